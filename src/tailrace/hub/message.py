"""The envelope: eleven members around application data that is passed on byte for byte.

A frame is decoded once, with the payload left as the text it is. Output is made by joining bytes.
"""

from __future__ import annotations

from itertools import compress
from typing import Annotated, Final, Literal, cast

import msgspec
from msgspec import Meta, Raw

from tailrace.hub.errors import HubError
from tailrace.hub.ids import new_id
from tailrace.hub.members import (
    check_frame_text,
    invalid_message,
    nesting_error,
    parse_members,
    scan_members,
)

__all__ = [
    "SharedEnvelope",
    "Envelope",
    "encode_shared",
    "encode_envelope",
    "encode_metadata",
    "parse_members",
    "new_id",
    "parse_envelope",
]

FRAME_BYTES_MAX: Final = 1024 * 1024
METADATA_BYTES_MAX: Final = 64 * 1024
NAME_BYTES_MAX: Final = 128  # of an id, and of a type
MILLIS_MAX: Final = 2**53 - 1  # what every language counts exactly
HUB_ADDRESS: Final = "@(cloudflare/signal-hub)"
ENVELOPE_MEMBERS: Final = (
    *("id", "from", "to", "type", "payload", "pattern"),
    *("correlationId", "timestamp", "metadata", "ttl", "signature"),
)
NULL: Final = Raw(b"null")
EMPTY: Final = Raw(b"{}")
_ABSENT: Final = Raw()
# Each member costs its name, two quotes, a colon, and a comma or a brace.
_MEMBER_OVERHEAD_BYTES: Final = tuple(len(name) + 4 for name in ENVELOPE_MEMBERS)
_VERBATIM_MEMBERS: Final = frozenset({"payload", "metadata"})

# One character is one byte or more: the limit in bytes is looked at again where that matters.
Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]


class Envelope(msgspec.Struct, eq=False, gc=False, kw_only=True):
    """One message as it came. What it says of its sender is a wish, until somebody has verified it."""

    id: Name
    type: Name
    timestamp: Annotated[int, Meta(ge=0, le=MILLIS_MAX)]
    from_: str | None = msgspec.field(name="from", default=None)
    to: str | None = None
    payload: Raw = NULL
    pattern: Literal["tell", "ask"] = "tell"
    correlation_id: str | None = msgspec.field(name="correlationId", default=None)
    metadata: Raw = EMPTY
    ttl: Annotated[int, Meta(ge=1, le=MILLIS_MAX)] | None = None
    signature: str | None = None

    @property
    def is_ask(self) -> bool:
        return self.pattern == "ask"

    def is_expired(self, now_ms: int) -> bool:
        return self.ttl is not None and self.timestamp + self.ttl < now_ms


class _CompleteEnvelope(Envelope, forbid_unknown_fields=True, eq=False, gc=False, kw_only=True):
    """An envelope with all its members, as most clients write it: none can be missing, or another."""

    from_: str | None = msgspec.field(name="from")
    to: str | None = msgspec.field()
    payload: Raw = msgspec.field()
    pattern: Literal["tell", "ask"] = msgspec.field()
    correlation_id: str | None = msgspec.field(name="correlationId")
    metadata: Raw = msgspec.field()
    ttl: Annotated[int, Meta(ge=1, le=MILLIS_MAX)] | None = msgspec.field()
    signature: str | None = msgspec.field()


class _MemberTexts(msgspec.Struct, eq=False, gc=False):
    """The members as text, in order, to see how long they are together."""

    id: Raw = _ABSENT
    from_: Raw = msgspec.field(name="from", default=_ABSENT)
    to: Raw = _ABSENT
    type: Raw = _ABSENT
    payload: Raw = _ABSENT
    pattern: Raw = _ABSENT
    correlation_id: Raw = msgspec.field(name="correlationId", default=_ABSENT)
    timestamp: Raw = _ABSENT
    metadata: Raw = _ABSENT
    ttl: Raw = _ABSENT
    signature: Raw = _ABSENT


_envelope_decoder: Final = msgspec.json.Decoder(Envelope)
_complete_decoder: Final = msgspec.json.Decoder(_CompleteEnvelope)
_member_texts_decoder: Final = msgspec.json.Decoder(_MemberTexts)
_quoted: Final = msgspec.json.Encoder().encode
# What a whole frame has beside its values, with the quotes of the three texts that are never null.
_FRAME_OVERHEAD_BYTES: Final = 1 + sum(_MEMBER_OVERHEAD_BYTES) + len('""""""')


def parse_envelope(frame: bytes, bytes_max: int = FRAME_BYTES_MAX) -> Envelope:
    """The envelope of a frame, or the refusal that its sender is told."""
    if len(frame) > bytes_max:
        raise HubError(
            "message_too_large",
            f"a message has at most {bytes_max} bytes",
            {"messageSize": len(frame), "maxSize": bytes_max},
        )
    check_frame_text(frame)
    envelope = _parse_complete(frame)
    if envelope is None:
        envelope = _parse_any(frame)
    _check_envelope(envelope)
    return envelope


def _parse_complete(frame: bytes) -> Envelope | None:
    """A frame that is its eleven members and nothing else, by one look; None if it may be another.

    With all members there, the values as they were decoded explain every byte only if none came twice and
    no text has an escape or a character of more bytes than one.
    """
    try:
        found = _complete_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None
    size = len(found.id) + len(found.type) + len(found.pattern) + len(found.payload) + len(found.metadata)
    for text in (found.from_, found.to, found.correlation_id, found.signature):
        size += 4 if text is None else len(text) + 2
    size += len(str(found.timestamp)) + (4 if found.ttl is None else len(str(found.ttl)))
    return found if _FRAME_OVERHEAD_BYTES + size == len(frame) else None


def _parse_any(frame: bytes) -> Envelope:
    try:
        envelope = _envelope_decoder.decode(frame)
        plain = _has_no_duplicates(frame)
    except RecursionError:
        raise nesting_error() from None
    except msgspec.ValidationError as error:
        raise invalid_message(f"not an envelope: {error}") from None
    except msgspec.DecodeError as error:
        if b"\\u" not in frame:
            raise invalid_message(f"not JSON: {error}") from None
        envelope, plain = _parse_lone_surrogates(frame), True
    if not plain:
        scan_members(frame)
    return envelope


def _has_no_duplicates(frame: bytes) -> bool:
    """Whether the members as they were decoded explain every byte of the frame: then none came twice."""
    found = cast("tuple[Raw, ...]", msgspec.structs.astuple(_member_texts_decoder.decode(frame)))
    sizes = list(map(len, found))  # 0 for those that are not there
    return 1 + sum(sizes) + sum(compress(_MEMBER_OVERHEAD_BYTES, sizes)) == len(frame)


def _parse_lone_surrogates(frame: bytes) -> Envelope:
    """Half a surrogate pair, escaped, is legal JSON, and what JavaScript writes; msgspec refuses it."""
    found = scan_members(frame)
    kept = [name for name in ENVELOPE_MEMBERS if name in found and name not in _VERBATIM_MEMBERS]
    texts = [b'"%b":%b' % (name.encode(), found[name]) for name in kept]
    try:
        envelope = _envelope_decoder.decode(b"{" + b",".join(texts) + b"}")
    except msgspec.DecodeError as error:
        raise invalid_message(f"not an envelope: {error}") from None
    envelope.payload = found.get("payload", NULL)
    envelope.metadata = found.get("metadata", EMPTY)
    return envelope


def _check_envelope(envelope: Envelope) -> None:
    if not (envelope.id.isascii() and envelope.type.isascii()):
        for name, text in (("id", envelope.id), ("type", envelope.type)):
            if len(text.encode()) > NAME_BYTES_MAX:
                raise invalid_message(f"{name} has more than {NAME_BYTES_MAX} bytes", field=name)
    metadata = envelope.metadata
    if metadata is EMPTY:
        return
    if len(metadata) > METADATA_BYTES_MAX:
        raise invalid_message(f"metadata has more than {METADATA_BYTES_MAX} bytes", field="metadata")
    text = bytes(metadata)
    if text == b"null":
        envelope.metadata = EMPTY
    elif not text.startswith(b"{"):
        raise invalid_message("metadata is an object", field="metadata")


class SharedEnvelope(msgspec.Struct, frozen=True, gc=False):
    """An envelope without `id` and `to`: encoded once, however many recipients it has."""

    middle: bytes
    rest: bytes

    def frame(self, identifier: str, to: str) -> bytes:
        """The copy for one recipient. An id of ours and an address that was checked need no escapes."""
        return b'{"id":"%b%b%b%b' % (identifier.encode(), self.middle, to.encode(), self.rest)


def encode_shared(
    *,
    from_: str,
    type: str,  # noqa: A002 - as the member is called
    payload: bytes | Raw,
    timestamp: int,
    pattern: str = "tell",
    correlation_id: str | None = None,
    metadata: bytes | Raw = b"{}",
    ttl: int | None = None,
) -> SharedEnvelope:
    """What all copies of a message share. Payload and metadata are JSON texts, and stay as they are."""
    rest = (
        b'","type":%b,"payload":%b,"pattern":"%b","correlationId":%b,"timestamp":%d,"metadata":%b,"ttl":%b'
        % (
            _quoted(type),
            payload,
            pattern.encode(),
            b"null" if correlation_id is None else _quoted(correlation_id),
            timestamp,
            metadata,
            b"null" if ttl is None else b"%d" % ttl,
        )
    )
    return SharedEnvelope(b'","from":%b,"to":"' % _quoted(from_), rest + b',"signature":null}')


def encode_envelope(
    *,
    id: str,  # noqa: A002 - as the member is called
    from_: str,
    to: str,
    type: str,  # noqa: A002
    payload: bytes | Raw,
    timestamp: int,
    pattern: str = "tell",
    correlation_id: str | None = None,
    metadata: bytes | Raw = b"{}",
    ttl: int | None = None,
) -> bytes:
    """One envelope, with exactly the eleven members in their order. An id of ours needs no escapes."""
    return (
        b'{"id":"%b","from":%b,"to":"%b","type":%b,"payload":%b,"pattern":"%b","correlationId":%b,'
        b'"timestamp":%d,"metadata":%b,"ttl":%b,"signature":null}'
        % (
            id.encode(),
            _quoted(from_),
            to.encode(),
            _quoted(type),
            payload,
            pattern.encode(),
            b"null" if correlation_id is None else _quoted(correlation_id),
            timestamp,
            metadata,
            b"null" if ttl is None else b"%d" % ttl,
        )
    )


def encode_metadata(given: dict[str, Raw], **own: object) -> bytes:
    """Metadata from members that were cut from a message, and members of our own."""
    return _quoted({**given, **own})
