"""The causal graph: what was accepted, delivered, processed, answered or lost, as records of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.hub import copies
from tailrace.hub.copies import Copy
from tailrace.hub.effects import Append

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

STREAM: Final = "hub/trace"
BATCH_RECORDS: Final = 1000
SHARD: Final = "0"


class Trace:
    """Written in batches, off the path. `durable` is about stored messages, `all` about every one."""

    def __init__(self, hub: Hub, mode: str) -> None:
        self._hub = hub
        self._mode = mode
        self._records: list[bytes] = []

    @property
    def dirty(self) -> bool:
        return bool(self._records)

    def note(
        self,
        event: str,
        copy: Copy,
        now_ms: int,
        *,
        kind: str = "send",
        stream: str | None = None,
        offset: str | None = None,
        reason: str | None = None,
    ) -> None:
        """One event of one copy."""
        if self._mode == "off" or (self._mode == "durable" and stream is None and event != "dead"):
            return
        metadata = copies.metadata_of(copy)
        original = metadata.get("originalMessageId")
        record: dict[str, Any] = {
            "ev": event,
            "at": now_ms,
            "id": copy.correlation_id if original is None else original,
            "copy": copy.id,
            "parent": copy.correlation_id,
            "correlationId": copy.correlation_id,
            "traceId": metadata.get("traceId"),
            "from": copy.sender,
            "to": copy.to,
            "kind": kind,
            "topic": metadata.get("topic"),
            "type": copy.type,
            "bytes": len(copy.payload),
            "sentAt": copy.timestamp,
            "stream": stream,
            "offset": offset,
            "shard": SHARD,
        }
        if reason is not None:
            record["reason"] = reason
        self._records.append(msgspec.json.encode(record))
        if len(self._records) >= BATCH_RECORDS:
            self.flush()

    def flush(self) -> None:
        if self._records:
            records, self._records = self._records, []
            self._hub.append(Append(STREAM, b",".join(records), lengths=[len(one) for one in records]))
