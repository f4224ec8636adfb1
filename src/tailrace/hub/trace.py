"""Message trace: records of accepted, delivered, processed, replied and dead messages in `hub/trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.hub import requests
from tailrace.hub.effects import Append
from tailrace.hub.requests import OutgoingMessage

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

TRACE_STREAM: Final = "hub/trace"
BATCH_RECORDS: Final = 1000
SHARD: Final = b"0"
NULL: Final = b"null"
_quoted: Final = msgspec.json.Encoder().encode


class MessageTrace:
    """Records are written in batches. Mode `durable` covers stored messages, `all` every message."""

    def __init__(self, hub: Hub, mode: str) -> None:
        self._hub = hub
        self._mode = mode
        self._records: list[bytes] = []

    def record(
        self,
        event: str,
        copy: OutgoingMessage,
        now_ms: int,
        *,
        kind: str = "send",
        stream: str | None = None,
        offset: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Adds one event of one message."""
        if self._mode == "off" or (self._mode == "durable" and stream is None and event != "dead"):
            return
        metadata = requests.parse_metadata(copy)
        correlation = NULL if copy.correlation_id is None else _quoted(copy.correlation_id)
        encoded = (
            b'{"ev":"%b","at":%d,"id":%b,"copy":"%b","parent":%b,"correlationId":%b,"traceId":%b,%b,"to":%b,'
            b'"kind":"%b","topic":%b,"type":%b,"bytes":%d,"sentAt":%d,"stream":%b,"offset":%b,"shard":"%b"'
            % (
                event.encode(),
                now_ms,
                metadata.get("originalMessageId", correlation),
                copy.id.encode(),
                correlation,
                correlation,
                metadata.get("traceId", NULL),
                copy.sender.from_member,
                _quoted(copy.to),
                kind.encode(),
                metadata.get("topic", NULL),
                _quoted(copy.type),
                len(copy.payload),
                copy.timestamp,
                NULL if stream is None else _quoted(stream),
                NULL if offset is None else _quoted(offset),
                SHARD,
            )
        )
        ending = b"}" if reason is None else b',"reason":%b}' % _quoted(reason)
        self.add(encoded + ending)

    @property
    def is_on(self) -> bool:
        """Whether stored messages are traced."""
        return self._mode != "off"

    def add(self, record: bytes) -> None:
        self._records.append(record)
        self._hub.has_unflushed = True
        if len(self._records) >= BATCH_RECORDS:
            self.flush()

    def flush(self) -> None:
        if self._records:
            records, self._records = self._records, []
            self._hub.append(Append(TRACE_STREAM, b",".join(records), lengths=[len(one) for one in records]))
