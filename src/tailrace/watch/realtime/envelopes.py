"""Envelopes: the JSON messages of the realtime protocol, encoded once for all recipients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tailrace.log.journal import crc32c_extend
from tailrace.protocol.websocket_frames import encode_text
from tailrace.watch.document import Change


class Envelope:
    """An encoded message; its WebSocket frame is made on first use."""

    __slots__ = ("_websocket", "body")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._websocket: bytes | None = None

    @property
    def websocket(self) -> bytes:
        if self._websocket is None:
            self._websocket = encode_text(self.body)
        return self._websocket


def reply(kind: str, message_id: str | None, payload: dict[str, Any], **extra: Any) -> Envelope:
    found: dict[str, Any] = {} if message_id is None else {"id": message_id}
    return Envelope(orjson.dumps({**found, "type": kind, "version": 1, **extra, "payload": payload}))


def subscription_notice(
    kind: str, database: str, sub_ids: Sequence[str], payload: dict[str, Any], **more: Any
) -> Envelope:
    """A message about subscriptions."""
    found = {"type": kind, "version": 1, "database": database, "subIds": sub_ids, **more, "payload": payload}
    return Envelope(orjson.dumps(found))


def error(
    message_id: str | None,
    code: str,
    message: str,
    *,
    sub_id: str | None = None,
    retry_after_ms: int | None = None,
    **more: Any,
) -> Envelope:
    payload = {
        "code": code,
        "message": message,
        "subId": sub_id,
        "retryable": retry_after_ms is not None,
        "retryAfterMs": retry_after_ms,
        **more,
    }
    return reply("error", message_id, payload)


def encode_delta(change: Change, op: str, reason: str, include_data: bool) -> bytes:
    """The delta of a change; deletes carry no data."""
    entry = change.entry
    doc: dict[str, Any] = {"path": f"{entry.collection}/{entry.documentKey}", "id": entry.documentKey}
    if op != "delete":
        if include_data:
            doc["data"] = orjson.Fragment(bytes(entry.after))
        doc["version"] = entry.version
        doc["updatedAt"] = change.updated_ms
    else:
        doc["version"] = entry.version
    return orjson.dumps({"op": op, "reason": reason, "doc": doc})


def event(
    change: Change, lsn: str, sub_ids: Sequence[str], changed: bytes, token: str | None, checksum: bool
) -> Envelope:
    """`changed` comes from `encode_delta`; only what differs between clients is added."""
    entry = change.entry
    covered = b"" if token is None else b',"token":"%b"' % token.encode()
    payload = b'{"subId":%b,"delta":%b%b}' % (orjson.dumps(sub_ids[0]), changed, covered)
    tail = b',"checksum":"%08x"' % crc32c_extend(0, payload) if checksum else b""
    return Envelope(
        b'{"type":"event","version":1,"database":%b,"subIds":%b,"partition":%d,"seq":%d,"lsn":"%b","payload":%b%b'
        b',"extensions":{}}'
        % (
            orjson.dumps(entry.database),
            orjson.dumps(sub_ids),
            change.partition,
            change.seq,
            lsn.encode(),
            payload,
            tail,
        )
    )
