"""The copy that a recipient gets of what a sender said."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from tailrace.hub.fields import Request
from tailrace.hub.members import members
from tailrace.hub.message import Envelope, encode

# Metadata that is the hub's own, or nobody else's business.
OWNED: Final = frozenset(
    (
        *("via", "forwarded", "originalFrom", "originalMessageId", "broadcast", "publication", "topic"),
        *("mailbox", "redelivered", "deliveryCount", "subscriptionIds", "hubSeq", "verified", "forwarding"),
        *("authToken", "renewalToken", "resumeToken", "nonce"),
    )
)
# Metadata that says how to send, and is of no use to the recipient.
_ASKED: Final = frozenset(("ack", "requireAck", "expectReply", "renewOnHeartbeat"))
TRACE: Final = ("traceId", "spanId", "traceparent")


class Copy(msgspec.Struct, eq=False, gc=False):
    """An envelope for one recipient. `metadata` has no closing brace yet: more may follow."""

    id: str
    sender: str
    to: str
    type: str
    payload: bytes | Raw
    timestamp: int
    metadata: bytes
    pattern: str = "tell"
    correlation_id: str | None = None
    ttl: int | None = None

    def frame(self, more: bytes = b"") -> bytes:
        """As bytes; `more` are further members of the metadata, each with a leading comma."""
        return encode(
            id=self.id,
            from_=self.sender,
            to=self.to,
            type=self.type,
            payload=self.payload,
            timestamp=self.timestamp,
            pattern=self.pattern,
            correlation_id=self.correlation_id,
            metadata=self.metadata + more + b"}",
            ttl=self.ttl,
        )

    def is_expired(self, now_ms: int) -> bool:
        return self.ttl is not None and self.timestamp + self.ttl < now_ms


def carried(request: Request) -> bytes:
    """The sender's metadata as far as it is passed on, as `{"a":1` or `{`: without the closing brace."""
    raw = request.metadata.raw
    if OWNED.isdisjoint(raw) and _ASKED.isdisjoint(raw):
        text = bytes(request.envelope.metadata).strip()
        return text[:-1].rstrip() if raw else b"{"
    kept = {name: value for name, value in raw.items() if name not in OWNED and name not in _ASKED}
    return msgspec.json.encode(kept)[:-1] if kept else b"{"


def extended(metadata: bytes, more: bytes) -> bytes:
    """Open metadata with further members; `more` has no leading comma."""
    return metadata + more if metadata == b"{" else metadata + b"," + more


def traced(request: Request) -> bytes:
    """What ties a reply or an error to its request's trace."""
    found = {name: request.metadata.raw[name] for name in TRACE if name in request.metadata.raw}
    return msgspec.json.encode(found) if found else b"{}"


def stored(envelope: Envelope) -> Copy:
    """A copy that was kept in a stream, to be handed over."""
    metadata = bytes(envelope.metadata).strip()
    return Copy(
        envelope.id,
        envelope.from_ or "",
        envelope.to or "",
        envelope.type,
        envelope.payload,
        envelope.timestamp,
        metadata[:-1].rstrip(),
        envelope.pattern,
        envelope.correlation_id,
        envelope.ttl,
    )


def metadata_of(copy: Copy) -> dict[str, Raw]:
    return members(copy.metadata + b"}")
