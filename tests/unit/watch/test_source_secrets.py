"""Which secrets of the server a source may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings, split_list
from tailrace.watch.sources.config import SecretPolicy, SecretRef


def rules(settings: Settings) -> SecretPolicy:
    return SecretPolicy(split_list(settings.source_variables), split_list(settings.source_directories))


def allowed(found: SecretPolicy, secret: SecretRef) -> bool:
    try:
        found.check(secret)
    except TailraceError as refusal:
        return not (refusal.code == "forbidden" and "setting source_" in refusal.message)
    return True


@pytest.mark.parametrize("name", ["PG_DSN", "MONGO_DSN", "SHOP_PG_DSN", "PG_DSN_OF_SHOP"])
def test_variables_of_connection_strings_may_be_used(name: str) -> None:
    assert allowed(rules(Settings()), SecretRef(env=name))


@pytest.mark.parametrize(
    "name",
    [
        *("TAILRACE_AUTH_JWT_SECRET", "TAILRACE_RECOVERY_KEY", "TAILRACE_DSN", "TAILRACE_PG_DSN"),
        *("AWS_SECRET_ACCESS_KEY", "AWS_DSN", "AZURE_STORAGE_DSN", "GOOGLE_DSN"),
        *("PATH", "HOME", "DATABASE_URL", "DSN", "pg_dsn"),
    ],
)
def test_other_variables_are_not_for_sources(name: str) -> None:
    assert not allowed(rules(Settings()), SecretRef(env=name))


def test_an_operator_says_which_variables_may_be_used() -> None:
    found = rules(Settings(source_variables="DATABASE_URL, SHOP_*"))
    assert allowed(found, SecretRef(env="DATABASE_URL"))
    assert allowed(found, SecretRef(env="SHOP_X"))
    assert not allowed(found, SecretRef(env="PG_DSN"))
    everything = rules(Settings(source_variables="*"))
    assert allowed(everything, SecretRef(env="ANY"))
    assert not allowed(everything, SecretRef(env="TAILRACE_AUTH_JWT_SECRET")), "only if it is meant"
    assert allowed(rules(Settings(source_variables="AWS_DSN")), SecretRef(env="AWS_DSN"))
    assert not allowed(rules(Settings(source_variables="")), SecretRef(env="PG_DSN"))


def test_files_lie_in_the_directories_that_are_named(tmp_path: Path) -> None:
    inside, outside = tmp_path / "secrets", tmp_path / "etc"
    for directory in (inside, outside, inside / "..data"):
        directory.mkdir()
    (outside / "key").write_text("x")
    (inside / "..data" / "dsn").write_text("x")
    (inside / "dsn").symlink_to(inside / "..data" / "dsn")  # as Kubernetes does it
    (inside / "out").symlink_to(outside / "key")
    found = rules(Settings(source_directories=str(inside)))
    assert allowed(found, SecretRef(file=str(inside / "dsn")))
    assert allowed(found, SecretRef(file=str(inside / "not-there-yet")))
    for wrong in (outside / "key", inside / "out", inside / ".." / "etc" / "key", f"{inside}-more/dsn"):
        assert not allowed(found, SecretRef(file=str(wrong))), wrong
    assert allowed(rules(Settings()), SecretRef(file="/run/secrets/dsn"))
    assert not allowed(rules(Settings()), SecretRef(file="/etc/passwd"))
    assert not allowed(rules(Settings(source_directories="")), SecretRef(file="/run/secrets/dsn"))
