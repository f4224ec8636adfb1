"""The `state-protocol` profile: records say what happened to one row, or where a snapshot begins and ends.

Records are checked and stored as they were sent.
"""

from __future__ import annotations

from typing import Final, cast

from msgspec import Struct

from tailrace.common.errors import TailraceError
from tailrace.schema.body import invalid_request, shorten
from tailrace.schema.timestamps import is_date_time

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
