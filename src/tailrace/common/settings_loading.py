"""Loads settings from the preset, the file, environment variables and flags; later sources take precedence.

Each value carries its source, so that an error can name the flag, variable or line that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final, cast

import msgspec
from msgspec import Struct

from tailrace.common import memory
from tailrace.common.limits import Limits
from tailrace.common.settings import (
    ENV_PREFIX,
    PRESETS,
    SETTINGS_TABLE,
    Settings,
    SettingsError,
    parse_networks,
    parse_setting,
)

CONFIG_NAME: Final = "tailrace.toml"
# Variables that the command line, the failpoints and Spark read.
NON_SETTING_VARIABLES: Final = frozenset(
    {
        "TAILRACE_URL",
        "TAILRACE_ENDPOINT",
        "TAILRACE_TOKEN",
        "TAILRACE_FAILPOINT",
        "TAILRACE_PIPELINE_PATH_REWRITE",
    }
)
OVERLAY_PREFIX: Final = "TAILRACE_SEARCH_WAL_OVERLAY_"

ChosenValues = dict[str, tuple[object, str]]  # by name: the value and its source


def load_settings(
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Settings:
    """Combine the settings of all sources, or raise :class:`SettingsError`.

    ``flags`` holds explicitly given values by field name. ``directory`` is searched for ``tailrace.toml``; by
    default it is the current one.
    """
    layers = [_from_env(os.environ if env is None else env), _from_flags(flags or {})]
    config = next((value for layer in reversed(layers) if (value := layer.get("config"))), ("", ""))[0]
    layers.insert(0, _from_file(str(config), directory or Path()))
    chosen: ChosenValues = {}
    for layer in layers:
        chosen.update(layer)
    _auto_tune(chosen)
    preset = str(chosen.get("preset", ("default", ""))[0])
    for name, value in PRESETS.get(preset, {}).items():
        chosen.setdefault(name, (value, f"preset {preset}"))
    _lower_dependent_defaults(chosen)
    settings = _build(chosen)
    _check_combinations(settings)
    return settings


def _lower_dependent_defaults(chosen: ChosenValues) -> None:
    """Lower defaults that must not exceed another setting when that one is chosen smaller."""
    for name, bound in (("append_body_bytes", "append_queue_stream_bytes"), ("append_wait_ms", "request_ms")):
        value, source = chosen.get(bound, (None, ""))
        if name not in chosen and isinstance(value, int) and 0 < value < int(SETTINGS_TABLE[name].default):
            chosen[name] = (value, source)


def _auto_tune(chosen: ChosenValues) -> None:
    """Add the tuned settings to the chosen ones if `auto_tune` is on."""
    text, source = chosen.get("auto_tune", ("", ""))
    try:
        size_mb = memory.requested_mb(str(text))
        if size_mb is None:
            chosen.pop("auto_tune", None)
            return
        preset = memory.largest_preset_mb(size_mb)
    except ValueError as error:
        raise SettingsError(f"{source}: {error}") from None
    body_bytes = int(str(chosen["append_body_bytes"][0])) if "append_body_bytes" in chosen else None
    for name, value in memory.tuned_settings(preset, body_bytes).items():
        if name in chosen:
            raise SettingsError(
                f"{chosen[name][1]} cannot be combined with {SETTINGS_TABLE['auto_tune'].flag}"
            )
        chosen[name] = (value, source)
    chosen["auto_tune"] = (str(size_mb), source)


def unknown_variable_warnings(env: Mapping[str, str]) -> list[str]:
    """Warnings about environment variables that look like settings but are unknown."""
    known = {setting.env for setting in SETTINGS_TABLE.values()} | NON_SETTING_VARIABLES
    warnings: list[str] = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in known:
            continue
        if name.startswith(OVERLAY_PREFIX):
            warnings.append(f"{name} has no effect: the tail is always searched")
            continue
        near = get_close_matches(name, known, 1, 0.8)
        warnings.append(f"{name} is not a setting" + (f"; did you mean {near[0]}?" if near else ""))
    return warnings


def _from_env(env: Mapping[str, str]) -> ChosenValues:
    found: ChosenValues = {}
    for setting in SETTINGS_TABLE.values():
        if (text := env.get(setting.env)) is None:
            continue
        try:
            found[setting.name] = (parse_setting(setting, text), setting.env)
        except SettingsError as error:
            raise SettingsError(f"{setting.env}: {error}") from None
    return found


def _from_flags(flags: Mapping[str, object]) -> ChosenValues:
    found: ChosenValues = {}
    for name, value in flags.items():
        setting = SETTINGS_TABLE[name]
        try:
            found[name] = (parse_setting(setting, value) if isinstance(value, str) else value, setting.flag)
        except SettingsError as error:
            raise SettingsError(f"{setting.flag}: {error}") from None
    return found


def _from_file(config: str, directory: Path) -> ChosenValues:
    path = Path(config) if config else directory / CONFIG_NAME
    if not config and not path.is_file():
        return {}
    import tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"settings file {path}: {error}") from None
    found: ChosenValues = {}
    for name, value in document.items():
        setting = SETTINGS_TABLE.get(name)
        if setting is None or name == "config":
            raise SettingsError(f"settings file {path}: unknown setting {name!r}")
        source = f"{name} in {path}"
        try:
            parsed = (
                parse_setting(setting, value) if isinstance(value, str) and setting.kind == "int" else value
            )
        except SettingsError as error:
            raise SettingsError(f"{source}: {error}") from None
        found[name] = (parsed, source)
    return found


def _build(chosen: ChosenValues) -> Settings:
    own: dict[str, object] = {}
    bounds: dict[str, object] = {}
    for name, (value, source) in chosen.items():
        shape: type[Struct] = Limits if SETTINGS_TABLE[name].limit else Settings
        # Validate each one alone first, so that the message can name its flag, variable or line.
        try:
            msgspec.convert({name: value}, shape, dec_hook=_to_path)
        except msgspec.ValidationError as error:
            allowed = SETTINGS_TABLE[name].choices
            reason = f"use one of {', '.join(allowed)}" if allowed else str(error).split(" - at `")[0]
            raise SettingsError(f"{source}: {reason}") from None
        (bounds if SETTINGS_TABLE[name].limit else own)[name] = value
    limits = msgspec.convert(bounds, Limits)
    return msgspec.structs.replace(msgspec.convert(own, Settings, dec_hook=_to_path), limits=limits)


def _to_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("Expected a path")


def _check_combinations(settings: Settings) -> None:
    """Reject settings that are valid alone but not together."""
    limits = settings.limits
    ordered = (
        ("long_poll_default_ms", "long_poll_max_ms"),
        ("long_poll_max_ms", "request_ms"),
        ("details_max_wait_ms", "request_ms"),
        ("append_wait_ms", "request_ms"),
        ("list_page", "list_page_max"),
        ("lease_min_ms", "lease_default_ms"),
        ("lease_default_ms", "lease_max_ms"),
        ("ws_ping_ms", "ws_dead_ms"),
        ("append_body_bytes", "append_queue_stream_bytes"),
        ("append_queue_stream_bytes", "append_queue_max_bytes"),
        ("live_connections", "connections"),
    )
    for smaller, larger in ordered:
        low, high = cast("int", getattr(limits, smaller)), cast("int", getattr(limits, larger))
        if low > high:
            raise SettingsError(f"{smaller} ({low}) must not be larger than {larger} ({high})")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise SettingsError("tls_cert and tls_key must be set together")
    if settings.tls_self_signed and settings.tls_cert:
        raise SettingsError("tls_self_signed and tls_cert cannot be combined: set one of them")
    if settings.traces_url and not settings.traces_url.startswith(("http://", "https://")):
        raise SettingsError("traces_url must be a URL such as http://127.0.0.1:4318")
    try:
        _ = settings.webhook_keys_since_ms
    except ValueError:
        raise SettingsError("webhook_keys_since must be a timestamp such as 2026-01-31T12:00:00Z") from None
    try:
        parse_networks(settings.trusted_proxies)
    except ValueError as error:
        raise SettingsError(f"trusted_proxies: {error}") from None
    if settings.edge_signing_key and len(settings.edge_signing_key.encode()) < 32:
        raise SettingsError("edge_signing_key must have at least 32 bytes")
    if settings.recovery_key and len(settings.recovery_key.encode()) < 32:
        raise SettingsError("recovery_key must have at least 32 bytes")
    for prefix in settings.auth_public_prefixes:
        if any(prefix.startswith(own) or own.startswith(prefix) for own in ("__", "hub/")):
            raise SettingsError(f"auth_public_streams: {prefix!r} would include system streams")
    if settings.auth_jwt_secret and len(settings.auth_jwt_secret.encode()) < 32:
        raise SettingsError("auth_jwt_secret must have at least 32 bytes")
