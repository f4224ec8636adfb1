"""A client's request with its fields, and the outgoing messages made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.hub.envelope import Envelope, SharedEnvelope, parse_members
from tailrace.hub.errors import field_error
from tailrace.hub.sender_identity import (
    NO_SENDER,
    Sender,
    encode_message,
    encode_shared_message,
    stored_sender,
)

if TYPE_CHECKING:
    from tailrace.hub.send import SendCommand


_text_decoder: Final = msgspec.json.Decoder(str)
_int_decoder: Final = msgspec.json.Decoder(int)
_bool_decoder: Final = msgspec.json.Decoder(bool)
_texts_decoder: Final = msgspec.json.Decoder(list[str])
_object_decoder: Final = msgspec.json.Decoder(dict[str, Any])
_any_decoder: Final = msgspec.json.Decoder(object)
NULL: Final = b"null"


class Fields:
    """The members of one object; `null` counts as absent."""

    __slots__ = ("raw",)

    def __init__(self, raw: dict[str, Raw]) -> None:
        self.raw = raw

    def __contains__(self, name: str) -> bool:
        return name in self.raw and bytes(self.raw[name]) != NULL

    def _of(self, name: str) -> Raw | None:
        found = self.raw.get(name)
        return None if found is None or (len(found) == 4 and bytes(found) == NULL) else found

    def text(self, name: str) -> str | None:
        found = self._of(name)
        if found is None:
            return None
        try:
            return _text_decoder.decode(found)
        except msgspec.MsgspecError:
            raise field_error(name, f"{name} must be a string") from None

    def integer(self, name: str) -> int | None:
        found = self._of(name)
        if found is None:
            return None
        try:
            return _int_decoder.decode(found)
        except msgspec.MsgspecError:
            raise field_error(name, f"{name} must be an integer") from None

    def truth(self, name: str) -> bool | None:
        found = self._of(name)
        if found is None:
            return None
        try:
            return _bool_decoder.decode(found)
        except msgspec.MsgspecError:
            raise field_error(name, f"{name} must be true or false") from None

    def texts(self, name: str) -> list[str] | None:
        found = self._of(name)
        if found is None:
            return None
        try:
            return _texts_decoder.decode(found)
        except msgspec.MsgspecError:
            raise field_error(name, f"{name} must be a list of strings") from None

    def object(self, name: str) -> dict[str, Any] | None:
        found = self._of(name)
        if found is None:
            return None
        try:
            return _object_decoder.decode(found)
        except msgspec.MsgspecError:
            raise field_error(name, f"{name} must be an object") from None

    def inner(self, name: str) -> Fields | None:
        """The members of a member."""
        found = self._of(name)
        if found is None:
            return None
        if bytes(found)[:1] != b"{":
            raise field_error(name, f"{name} must be an object")
        return Fields(parse_members(found))

    def value(self, name: str) -> object:
        found = self._of(name)
        if found is None:
            return None
        try:
            return _any_decoder.decode(found)
        except msgspec.MsgspecError:
            raise field_error(name, f"{name} must be valid JSON") from None


NO_FIELDS: Final = Fields({})


class HubRequest:
    """One frame from a client: its envelope, with the members of payload and metadata.

    With `wanted` (a parsed send without metadata) they are not parsed again.
    """

    __slots__ = ("envelope", "frame", "metadata", "payload", "sender", "verified", "wanted")

    def __init__(self, envelope: Envelope, frame: bytes, wanted: SendCommand | None = None) -> None:
        self.envelope = envelope
        self.frame = frame
        self.wanted = wanted
        self.payload = self.metadata = NO_FIELDS
        if wanted is None:
            self.payload = Fields(parse_members(envelope.payload))
            self.metadata = Fields(parse_members(envelope.metadata))
        self.sender: Sender = NO_SENDER  # set by stamp_sender
        self.verified = False  # by its signature

    @property
    def id(self) -> str:
        return self.envelope.id

    @property
    def is_ask(self) -> bool:
        return self.envelope.is_ask

    def text(self, name: str) -> str | None:
        """From the payload, else from the metadata: clients use either."""
        found = self.payload.text(name)
        return self.metadata.text(name) if found is None else found

    def truth(self, name: str) -> bool | None:
        found = self.payload.truth(name)
        return self.metadata.truth(name) if found is None else found

    def integer(self, name: str) -> int | None:
        found = self.payload.integer(name)
        return self.metadata.integer(name) if found is None else found


# Metadata that the hub sets, or that must not reach recipients.
HUB_METADATA: Final = frozenset(
    (
        *("via", "forwarded", "originalFrom", "originalMessageId", "broadcast", "publication", "topic"),
        *("mailbox", "redelivered", "deliveryCount", "subscriptionIds", "hubSeq", "verified", "forwarding"),
        *("authToken", "renewalToken", "resumeToken", "nonce"),
    )
)
# Delivery options, not forwarded.
_DELIVERY_OPTIONS: Final = frozenset(("ack", "requireAck", "expectReply", "renewOnHeartbeat"))
TRACE_FIELDS: Final = ("traceId", "spanId", "traceparent")


class OutgoingMessage(msgspec.Struct, eq=False, gc=False):
    """An envelope for one recipient. `metadata` has no closing brace yet: more may follow."""

    id: str
    sender: Sender
    to: str
    type: str
    payload: bytes | Raw
    timestamp: int
    metadata: bytes
    pattern: str = "tell"
    correlation_id: str | None = None
    ttl: int | None = None

    def frame(self, more: bytes = b"") -> bytes:
        """The frame; `more` are further members of the metadata, each with a leading comma."""
        return encode_message(self, more)

    def shared(self) -> SharedEnvelope:
        """Everything but `id` and `to`, encoded once for many recipients."""
        return encode_shared_message(self)

    def is_expired(self, now_ms: int) -> bool:
        return self.ttl is not None and self.timestamp + self.ttl < now_ms


def parse_time_ns(value: object) -> int | None:
    """Unix milliseconds or an RFC 3339 timestamp as Unix nanoseconds; None if it is neither.

    A timestamp without a zone is neither: it would mean another time on each server.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value * 1_000_000
    return parse_rfc3339_ns(value) if isinstance(value, str) else None


def forwarded_metadata(request: HubRequest) -> bytes:
    """The sender's metadata that is forwarded, without the closing brace: `{"a":1` or `{`."""
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
    """The trace fields of the request, for its reply or error."""
    found = {name: request.metadata.raw[name] for name in TRACE_FIELDS if name in request.metadata.raw}
    return msgspec.json.encode(found) if found else b"{}"


def outgoing_from_envelope(envelope: Envelope) -> OutgoingMessage:
    """A message read from a stream, to be delivered."""
    metadata = bytes(envelope.metadata).strip()
    return OutgoingMessage(
        envelope.id,
        stored_sender(envelope.from_ or ""),
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
