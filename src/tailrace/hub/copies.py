"""The copy that a recipient gets of what a sender said."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from tailrace.hub.fields import HubRequest
from tailrace.hub.members import parse_members
from tailrace.hub.message import Envelope, encode_envelope

# Metadata that is the hub's own, or nobody else's business.
HUB_METADATA: Final = frozenset(
    (
        *("via", "forwarded", "originalFrom", "originalMessageId", "broadcast", "publication", "topic"),
        *("mailbox", "redelivered", "deliveryCount", "subscriptionIds", "hubSeq", "verified", "forwarding"),
        *("authToken", "renewalToken", "resumeToken", "nonce"),
    )
)
# Metadata that says how to send, and is of no use to the recipient.
_DELIVERY_OPTIONS: Final = frozenset(("ack", "requireAck", "expectReply", "renewOnHeartbeat"))
TRACE_FIELDS: Final = ("traceId", "spanId", "traceparent")


class OutgoingMessage(msgspec.Struct, eq=False, gc=False):
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
        return encode_envelope(
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


def forwarded_metadata(request: HubRequest) -> bytes:
    """The sender's metadata as far as it is passed on, as `{"a":1` or `{`: without the closing brace."""
    raw = request.metadata.raw
    if HUB_METADATA.isdisjoint(raw) and _DELIVERY_OPTIONS.isdisjoint(raw):
        text = bytes(request.envelope.metadata).strip()
        return text[:-1].rstrip() if raw else b"{"
    kept = {
        name: value
        for name, value in raw.items()
        if name not in HUB_METADATA and name not in _DELIVERY_OPTIONS
    }
    return msgspec.json.encode(kept)[:-1] if kept else b"{"


def append_metadata(metadata: bytes, more: bytes) -> bytes:
    """Open metadata with further members; `more` has no leading comma."""
    return metadata + more if metadata == b"{" else metadata + b"," + more


def trace_metadata(request: HubRequest) -> bytes:
    """What ties a reply or an error to its request's trace."""
    found = {name: request.metadata.raw[name] for name in TRACE_FIELDS if name in request.metadata.raw}
    return msgspec.json.encode(found) if found else b"{}"


def outgoing_from_envelope(envelope: Envelope) -> OutgoingMessage:
    """A copy that was kept in a stream, to be handed over."""
    metadata = bytes(envelope.metadata).strip()
    return OutgoingMessage(
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


def parse_metadata(copy: OutgoingMessage) -> dict[str, Raw]:
    return parse_members(copy.metadata + b"}")
