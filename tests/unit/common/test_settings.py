"""Settings: where they come from, which one wins, and what is said about one that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.common.limits import MIB, Limits
from tailrace.common.settings import PRESETS, SETTINGS_TABLE, Settings, SettingsError, describe_settings
from tailrace.common.settings_loading import load_settings


def test_without_sources_everything_has_its_default(tmp_path: Path) -> None:
    assert load_settings({}, {}, tmp_path) == Settings()


def test_later_sources_win(tmp_path: Path) -> None:
    (tmp_path / "tailrace.toml").write_text('port = 1\nhost = "file"\nidle_ms = "3s"\n')
    env = {"TAILRACE_PORT": "2", "TAILRACE_HOST": "env"}
    settings = load_settings({"port": "3"}, env, tmp_path)
    assert (settings.port, settings.host, settings.limits.idle_ms) == (3, "env", 3000)


def test_a_preset_is_weaker_than_every_explicit_value(tmp_path: Path) -> None:
    settings = load_settings({"preset": "small"}, {"TAILRACE_BLOCK_CACHE_BYTES": "1MiB"}, tmp_path)
    assert settings.limits.block_cache_bytes == MIB
    assert settings.limits.append_queue_max_bytes == PRESETS["small"]["append_queue_max_bytes"]


def test_a_preset_may_come_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "tailrace.toml").write_text('preset = "small"\n')
    assert (
        load_settings({}, {}, tmp_path).limits.tail_memory_max_bytes
        == PRESETS["small"]["tail_memory_max_bytes"]
    )


def test_a_named_file_replaces_the_one_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "tailrace.toml").write_text("port = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("server_timing = true\n")
    settings = load_settings({"config": str(other)}, {}, tmp_path)
    assert settings.server_timing
    assert settings.port == Settings().port


@pytest.mark.parametrize(
    ("text", "value"),
    [("64MiB", 64 * MIB), ("64 mib", 64 * MIB), ("10_000", 10_000), ("5kb", 5000), ("7", 7), ("2GiB", 2**31)],
)
def test_sizes_take_units(text: str, value: int) -> None:
    assert load_settings({"read_page_bytes": text}, {}).limits.read_page_bytes == value


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90_000), ("2m", 120_000), ("1h", 3_600_000), ("250", 250), ("1d", 86_400_000)]
)
def test_times_take_units(text: str, value: int) -> None:
    assert load_settings({"tombstone_ms": text}, {}).limits.tombstone_ms == value


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("0", False), ("TRUE", True), ("off", False)])
def test_yes_and_no_have_many_spellings(text: str, value: bool) -> None:
    assert load_settings({}, {"TAILRACE_INSECURE": text}).insecure is value


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        ({"port": "many"}, {}, "--port"),
        ({"port": "70000"}, {}, "--port"),
        ({"port": "-1"}, {}, "--port"),
        ({"append_body_bytes": "0"}, {}, "--append-body-bytes"),
        ({"append_body_bytes": "5 parsecs"}, {}, "--append-body-bytes"),
        ({}, {"TAILRACE_LOG_LEVEL": "loud"}, "TAILRACE_LOG_LEVEL"),
        ({}, {"TAILRACE_INSECURE": "perhaps"}, "TAILRACE_INSECURE"),
        ({}, {"TAILRACE_DATA_DIR": ""}, "TAILRACE_DATA_DIR"),
        ({"preset": "huge"}, {}, "--preset"),
        ({"config": "/nowhere/tailrace.toml"}, {}, "/nowhere/tailrace.toml"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_source(
    flags: dict[str, str], env: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(flags, env)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("colour = 1\n", "colour"),
        ("port = \n", "tailrace.toml"),
        ('port = "x"\n', "port in"),
        ("host = 3\n", "host in"),
        ("[limits]\nidle_ms = 1\n", "limits"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "tailrace.toml").write_text(text)
    with pytest.raises(SettingsError, match=named):
        load_settings({}, {}, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        {"long_poll_max_ms": "10s"},
        {"list_page": "5000"},
        {"lease_min_ms": "1h"},
        {"append_body_bytes": "1GiB"},
        {"append_queue_stream_bytes": "1GiB"},
        {"live_connections": "30000"},
        {"tls_cert": "cert.pem"},
        {"auth_jwt_secret": "too-short"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(SettingsError):
        load_settings(flags, {})


def test_the_largest_body_fits_into_the_queue_that_was_chosen() -> None:
    assert (
        load_settings({"append_queue_stream_bytes": "32MiB"}, {}).limits.append_body_bytes == 32 * 1024 * 1024
    )
    assert load_settings({"preset": "small"}, {}).limits.append_body_bytes == 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.8.8.8", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.1.2.3", False),
        ("example.org", False),
    ],
)
def test_loopback_is_recognised(host: str, alone: bool) -> None:
    settings = Settings(host=host)
    assert settings.loopback_only is alone
    assert settings.loopback_webhooks_allowed is alone


def test_loopback_webhooks_may_be_forced_either_way() -> None:
    assert Settings(host="0.0.0.0", loopback_webhooks="yes").loopback_webhooks_allowed
    assert not Settings(loopback_webhooks="no").loopback_webhooks_allowed


def test_the_table_has_every_field_once() -> None:
    fields = {*Settings.__struct_fields__, *Limits.__struct_fields__} - {"limits"}
    assert set(SETTINGS_TABLE) == fields
    assert len({setting.env for setting in SETTINGS_TABLE.values()}) == len(SETTINGS_TABLE)


def test_secrets_are_not_described() -> None:
    secret = "s" * 40
    rows = {row["name"]: row for row in describe_settings(Settings(auth_jwt_secret=secret))}
    assert rows["auth_jwt_secret"]["value"] == "(set)"
    assert secret not in str(rows)
    assert rows["idle_ms"] == {"name": "idle_ms", "value": 75_000, "default": 75_000, "unit": "ms"}


def test_every_preset_stands_on_its_own() -> None:
    for name in PRESETS:
        assert load_settings({"preset": name}, {}).preset == name


def test_the_instant_of_webhook_keys_has_a_zone() -> None:
    assert load_settings({"webhook_keys_since": "2026-01-01T01:00:00+01:00"}, {}).webhook_keys_since_ms == (
        1_767_225_600_000
    )
    assert load_settings({}, {}).webhook_keys_since_ms == 0
    for text in ("2026-01-01T00:00:00", "yesterday", "1767225600"):
        with pytest.raises(SettingsError, match="webhook_keys_since must be a timestamp"):
            load_settings({"webhook_keys_since": text}, {})
    with pytest.raises(SettingsError, match="--webhook-key-ms"):
        load_settings({"webhook_key_ms": "59m"}, {})
