"""A bucket without keys: a server that was named by its endpoint is not asked at all, and why is told."""

from __future__ import annotations

import pytest

from conftest import StartServer
from support.cli import tailrace
from support.s3 import S3Server
from tailrace.storage.object_store.cloud import check_credentials
from tailrace.storage.object_store.interface import open_object_store
from tailrace.testing import ServerFailedError

HERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("scheme", "env", "missing"),
    [
        ("s3", {"AWS_ENDPOINT_URL": HERE}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("s3", {"AWS_ENDPOINT": HERE, "AWS_ACCESS_KEY_ID": "half"}, "AWS_SECRET_ACCESS_KEY"),
        ("az", {"AZURE_STORAGE_ENDPOINT": HERE}, "AZURE_STORAGE_ACCOUNT_KEY"),
        ("s3", {"AWS_ENDPOINT_URL": HERE, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, ""),
        ("s3", {"AWS_ENDPOINT_URL": HERE, "AWS_SKIP_SIGNATURE": "true"}, ""),
        ("s3", {"AWS_ENDPOINT_URL": HERE, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, ""),
        ("az", {"AZURE_STORAGE_ENDPOINT": HERE, "AZURE_STORAGE_ACCOUNT_KEY": "k"}, ""),
        ("s3", {}, ""),
        ("gs", {}, ""),
    ],
)
def test_what_opens_the_door(scheme: str, env: dict[str, str], missing: str) -> None:
    if not missing:
        check_credentials(f"{scheme}://bucket", scheme, env)
        return
    with pytest.raises(ValueError, match=missing) as refused:
        check_credentials(f"{scheme}://bucket", scheme, env)
    assert HERE in str(refused.value)


def test_a_server_without_keys_for_its_bucket_says_so_and_does_not_start(
    start_server: StartServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3.env():
        monkeypatch.delenv(name, raising=False)
    env = {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": "us-east-1"}
    with pytest.raises(ServerFailedError, match="there are no keys for s3://tailrace/keys"):
        start_server("--object-store", s3.url("keys"), env=env)
    for verb in ("verify", "gc"):
        done = tailrace(verb, "--object-store", s3.url("keys"), env=env)
        assert (done.code, done.out) == (2, "")
        assert "AWS_ACCESS_KEY_ID" in done.err
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY"):
        open_object_store(s3.url("keys"))


def test_keys_that_cannot_be_read_are_told_in_one_line(start_server: StartServer) -> None:
    env = {"GOOGLE_SERVICE_ACCOUNT": "/nowhere/key.json"}
    with pytest.raises(ServerFailedError, match="gs://bucket/history") as refused:
        start_server("--object-store", "gs://bucket/history", env=env)
    assert "Traceback" not in str(refused.value)
