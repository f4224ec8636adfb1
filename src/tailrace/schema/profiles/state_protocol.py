"""The `state-protocol` profile: checks of change and control records, and the touch configuration.

A record describes a change of one row, or the begin or end of a snapshot. Records are stored as they were
sent.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct

from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import is_date_time
from tailrace.schema.json_values import expect_object, invalid_request, shorten

OPERATIONS: Final = ("insert", "update", "delete")
CONTROLS: Final = ("snapshot-start", "snapshot-end", "reset")

_CHANGE_KEYS: Final = frozenset({"type", "key", "value", "old_value", "headers"})
_CHANGE_HEADERS: Final = frozenset({"operation", "txid", "timestamp"})
_CONTROL_KEYS: Final = frozenset({"headers"})
_CONTROL_HEADERS: Final = frozenset({"control", "offset"})

StateRecord = dict[str, object]


class Change(Struct, frozen=True):
    """What happened to one row of an entity; `before` and `after` are what is known of it."""

    entity: str
    operation: str
    before: object
    after: object


def check_state_record(record: object) -> None:
    """Refuses what is neither a change nor a control record."""
    if not isinstance(record, dict):
        raise invalid_request("state-protocol records must be JSON objects")
    given = cast("StateRecord", record)
    headers = given.get("headers")
    if not isinstance(headers, dict):
        raise invalid_request("state-protocol record.headers must be an object")
    named = cast("StateRecord", headers)
    if ("operation" in named) == ("control" in named):
        raise invalid_request("state-protocol record.headers must have either operation or control")
    if "control" in named:
        _check_control(given, named)
    else:
        _check_change(given, named)


def _check_control(given: StateRecord, headers: StateRecord) -> None:
    if headers["control"] not in CONTROLS:
        raise invalid_request(
            "state-protocol record.headers.control must be snapshot-start, snapshot-end, or reset"
        )
    _check_keys(given, _CONTROL_KEYS, "record")
    _check_keys(headers, _CONTROL_HEADERS, "record.headers")
    if "offset" in headers and not isinstance(headers["offset"], str):
        raise invalid_request("state-protocol record.headers.offset must be a string")


def _check_change(given: StateRecord, headers: StateRecord) -> None:
    operation = headers["operation"]
    if operation not in OPERATIONS:
        raise invalid_request("state-protocol record.headers.operation must be insert, update, or delete")
    _check_keys(given, _CHANGE_KEYS, "record")
    _check_keys(headers, _CHANGE_HEADERS, "record.headers")
    for key in ("type", "key"):
        value = given.get(key)
        if not isinstance(value, str) or not value.strip():
            raise invalid_request(f"state-protocol record.{key} must be a non-empty string")
    if operation != "delete" and "value" not in given:
        raise invalid_request(f"state-protocol {operation} records must include value")
    txid, timestamp = headers.get("txid", ""), headers.get("timestamp")
    if not isinstance(txid, str):
        raise invalid_request("state-protocol record.headers.txid must be a string")
    if "timestamp" in headers and not (isinstance(timestamp, str) and is_date_time(timestamp)):
        raise invalid_request("state-protocol record.headers.timestamp must be an RFC 3339 date-time")


def _check_keys(given: StateRecord, allowed: frozenset[str], path: str) -> None:
    for key in given:
        if key not in allowed:
            raise invalid_request(f"state-protocol {path}.{shorten(key)} is not supported")


def parse_change(record: object) -> Change | None:
    """The change a stored record tells of; None for controls, and for what is older than the profile."""
    try:
        check_state_record(record)
    except TailraceError:
        return None
    given = cast("StateRecord", record)
    operation = cast("StateRecord", given["headers"]).get("operation")
    if operation is None:
        return None
    return Change(
        cast("str", given["type"]), cast("str", operation), given.get("old_value"), given.get("value")
    )


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class MemoryConfig(Struct, frozen=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    bucket_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    filter_pow2: Annotated[int, Meta(ge=10, le=30)] = 22
    k: Annotated[int, Meta(ge=1, le=8)] = 4
    pending_max_keys: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    key_index_max_keys: Count = 32
    hot_key_ttl_ms: Count = 10_000
    hot_template_ttl_ms: Count = 10_000
    hot_max_keys: Count = 1_000_000
    hot_max_templates: Count = 4096


class TemplatesConfig(Struct, frozen=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    default_inactivity_ttl_ms: Count = 3_600_000
    last_seen_persist_interval_ms: Count = 300_000
    gc_interval_ms: Count = 60_000
    max_active_templates_per_entity: Annotated[int, Meta(ge=1, le=4096)] = 256
    max_active_templates_per_stream: Annotated[int, Meta(ge=1, le=65_536)] = 2048
    activation_rate_limit_per_minute: Count = 100


class TouchConfig(Struct, frozen=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    enabled: bool = False
    coarse_interval_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    touch_coalesce_window_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    on_missing_before: Literal["coarse", "skipBefore", "error"] = "coarse"
    lag_degrade_fine_touches_at_source_offsets: CountOrNone = 5000
    lag_recover_fine_touches_at_source_offsets: CountOrNone = 1000
    fine_touch_budget_per_batch: CountOrNone = 2000
    fine_tokens_per_second: CountOrNone = 200_000
    fine_burst_tokens: CountOrNone = 400_000
    lag_reserved_fine_touch_budget_per_batch: CountOrNone = 200
    memory: MemoryConfig = MemoryConfig()
    templates: TemplatesConfig = TemplatesConfig()

    def to_json(self) -> dict[str, object]:
        """What was asked for: `enabled` always, the rest where it differs from the default."""
        return {"enabled": self.enabled} | msgspec.to_builtins(self)


_PARTS: Final[dict[str, type[Struct]]] = {"memory": MemoryConfig, "templates": TemplatesConfig}


def parse_touch(body: object, path: str) -> TouchConfig:
    given = expect_object(body, path, _config_keys(TouchConfig))
    for part, kind in _PARTS.items():
        expect_object(given.get(part, {}), f"{path}.{part}", _config_keys(kind))
    try:
        return msgspec.convert(given, TouchConfig)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        raise invalid_request(
            f"{path}{shorten(where.rstrip('`'))}: {reason[:1].lower()}{reason[1:]}"
        ) from None


def _config_keys(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))
