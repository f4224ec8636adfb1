"""A stream with the profile `state-protocol` as a source: its records as changes of documents."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from tailrace.watch.sources.model import SourceError
from tailrace.watch.sources.pgtypes import dump_row, parse_json_value


class StateRecord(NamedTuple):
    """What one record says: about a row of a type, or about the stream."""

    control: str | None
    type: str = ""
    key: str = ""
    data: bytes | None = None  # None: it was deleted
    txn: str | None = None
    time: str | None = None


def read_state_record(raw: bytes | memoryview) -> StateRecord | None:
    """None for what is not of the protocol: it is older than the stream's profile."""
    record = parse_json_value(bytes(raw).decode())
    if isinstance(record, str):
        raise SourceError("a record is nested deeper than a document can be")
    headers = cast("dict[str, Any]", record).get("headers") if isinstance(record, dict) else None
    if not isinstance(headers, dict):
        return None
    named, given = cast("dict[str, Any]", headers), cast("dict[str, Any]", record)
    if "control" in named:
        return StateRecord(str(named["control"]))
    operation, entity, key = named.get("operation"), given.get("type"), given.get("key")
    if not isinstance(operation, str) or not isinstance(entity, str) or not isinstance(key, str):
        return None
    data: bytes | None = None
    if operation != "delete":
        value = given.get("value")
        data = dump_row(cast("dict[str, Any]", value) if isinstance(value, dict) else {"value": value})
    return StateRecord(None, entity, key, data, named.get("txid"), named.get("timestamp"))
