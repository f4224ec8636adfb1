"""The message envelope: ids, JSON member scanning, parsing, limits and encoding.

A frame is decoded once; payload and metadata stay JSON text and are forwarded byte for byte. Output is made
by joining bytes. Message ids are UUIDs of version 7 made by a counter.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from itertools import compress
from typing import Annotated, Final, Literal, NoReturn, cast

import msgspec
from msgspec import Meta, Raw

from tailrace.hub.errors import HubError

_COUNTER_BITS: Final = 42
_COUNTER_MASK: Final = 2**_COUNTER_BITS - 1
_LOW_MASK: Final = 0xFFFF  # of the last four digits of the counter, which change with each id
ID_RUN_MAX: Final = 4096
# Looking two digits up takes a third of the time of formatting them.
_HEX_PAIRS: Final = [f"{pair:02x}" for pair in range(256)]
HEX_PAIRS: Final = [pair.encode() for pair in _HEX_PAIRS]


class MessageIds:
    """Unique ids that increase within a process.

    After the time come 42 bits of a counter and 32 bits of the process. The counter begins anywhere in the
    lower half of its range, so that two processes with equal bits still differ, and none wraps in practice.
    """

    __slots__ = ("_count", "_prefix", "_process", "_stamp_ms")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start as in a new process: a forked child must not continue its parent's counter."""
        self._count = secrets.randbits(_COUNTER_BITS - 1)
        self._process = f"{secrets.randbits(32):08x}"
        self._stamp_ms = -1
        self._prefix = ""

    def __call__(self, now_ms: int) -> str:
        count = self._count = self._count + 1 & _COUNTER_MASK
        if now_ms > self._stamp_ms or not count & _LOW_MASK:
            self._begin(now_ms, count)
        return f"{self._prefix}{_HEX_PAIRS[count >> 8 & 255]}{_HEX_PAIRS[count & 255]}{self._process}"

    def run(self, now_ms: int, length: int) -> tuple[bytes, int, bytes]:
        """Several ids at once: what they begin with, the number of the first, and what they end with.

        Between the two stand the last four digits of the number, which counts up from one id to the next.
        """
        assert 0 < length <= ID_RUN_MAX
        first = self._count + 1
        if (first & _LOW_MASK) + length > _LOW_MASK + 1:
            first = (first | _LOW_MASK) + 1  # the digits would overflow within the run
        if now_ms > self._stamp_ms or first >> 16 != self._count >> 16:
            self._begin(now_ms, first & _COUNTER_MASK)
        self._count = first + length - 1 & _COUNTER_MASK
        return self._prefix.encode(), first & _LOW_MASK, self._process.encode()

    def _begin(self, now_ms: int, count: int) -> None:
        """What is the same for all ids of one millisecond. A clock that is set back stands still here."""
        self._stamp_ms = stamp_ms = max(now_ms, self._stamp_ms)
        self._prefix = (
            f"{stamp_ms >> 16 & 0xFFFFFFFF:08x}-{stamp_ms & 0xFFFF:04x}"
            f"-7{count >> 30:03x}-{0x8000 | count >> 16 & 0x3FFF:04x}-"
        )


new_id: Final = MessageIds()
os.register_at_fork(after_in_child=new_id.restart)


DEPTH_MAX: Final = 64
_NAME_SHOWN_MAX: Final = 128
_WHITESPACE: Final = re.compile(r"[ \t\n\r]*")
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: no state for each
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])


def parse_members(text: bytes | Raw) -> dict[str, Raw]:
    """The members of an object that was checked before; `null` has none. Of equal names the last counts."""
    try:
        return {} if len(text) == 4 and bytes(text) == b"null" else _object_decoder.decode(text)
    except msgspec.ValidationError:
        raise HubError("invalid_request", "payload must be an object", {"field": "payload"}) from None
    except msgspec.DecodeError:
        # Half a surrogate pair, escaped: legal JSON, and what JavaScript writes; msgspec refuses it.
        return scan_members(bytes(text), twice=True)


def check_frame_text(frame: bytes) -> None:
    """UTF-8 and depth."""
    if not frame.isascii():
        try:
            frame.decode()
        except UnicodeDecodeError as error:
            raise invalid_message(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if frame.count(b"[") + frame.count(b"{") > DEPTH_MAX and _exceeds_depth(frame):
        raise nesting_error()


def _exceeds_depth(frame: bytes) -> bool:
    """Whether brackets are left after removing the innermost pairs DEPTH_MAX times."""
    brackets = _STRINGS.sub(b"", frame).translate(_BRACKETS).translate(None, _NO_BRACKETS)
    for _ in range(DEPTH_MAX):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    # Unpaired brackets are not JSON: the parser reports that.
    return brackets.count(b"[") == brackets.count(b"]") > 0


def refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


# Numbers are skipped, not converted, however long they are.
_value_decoder: Final = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=refuse_constant)


def scan_members(frame: bytes, *, twice: bool = False) -> dict[str, Raw]:
    """The members of an object; slower, but detects duplicates."""
    found: dict[str, Raw] = {}
    text = frame.decode()
    try:
        position = _expect(text, _skip_whitespace(text, 0), "{")
        more = text[position : position + 1] != "}"
        while more:
            name, start, end = _scan_member(text, position)
            if name in found and not twice:
                raise ValueError(f"duplicate member {name[:_NAME_SHOWN_MAX]!r}")
            found[name] = Raw(text[start:end].encode())
            position = _skip_whitespace(text, end)
            more = text[position : position + 1] == ","
            position = _skip_whitespace(text, position + 1) if more else position
        if text[_expect(text, position, "}") :]:
            raise ValueError(f"unexpected text after the object at character {position}")
    except ValueError as error:
        raise invalid_message(f"not an envelope: {error}") from None
    except RecursionError:
        raise nesting_error() from None
    return found


def _scan_member(text: str, position: int) -> tuple[str, int, int]:
    """The name of a member, and where its value begins and ends."""
    if text[position : position + 1] != '"':
        raise ValueError(f"expected a name at character {position}")
    name, position = cast("tuple[str, int]", _value_decoder.raw_decode(text, position))
    start = _expect(text, _skip_whitespace(text, position), ":")
    _value, end = cast("tuple[object, int]", _value_decoder.raw_decode(text, start))
    return name, start, end


def _expect(text: str, position: int, mark: str) -> int:
    """The position after a mark and the whitespace behind it."""
    if text[position : position + 1] != mark:
        raise ValueError(f"expected {mark!r} at character {position}")
    return _skip_whitespace(text, position + 1)


def _skip_whitespace(text: str, position: int) -> int:
    gap = _WHITESPACE.match(text, position)
    return position if gap is None else gap.end()


def compact_json(text: bytes) -> bytes:
    """JSON without the space between its tokens, which stay as they are."""
    if not any(byte in text for byte in (b" ", b"\t", b"\n", b"\r")):
        return text
    parts: list[bytes] = []
    position = 0
    for string in _STRINGS.finditer(text):
        parts.append(text[position : string.start()].translate(None, b" \t\n\r"))
        parts.append(string[0])
        position = string.end()
    parts.append(text[position:].translate(None, b" \t\n\r"))
    return b"".join(parts)


def invalid_message(message: str, *, field: str | None = None) -> HubError:
    return HubError("invalid_message", message, None if field is None else {"field": field})


def nesting_error() -> HubError:
    return invalid_message(f"nested deeper than {DEPTH_MAX} levels")


__all__ = [
    "Envelope",
    "SharedEnvelope",
    "encode_envelope",
    "encode_shared",
    "new_id",
    "parse_envelope",
    "parse_members",
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

# In characters; _check_envelope checks the limit in bytes.
Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]


class Envelope(msgspec.Struct, eq=False, gc=False, kw_only=True):
    """One message as received. Its `from` is a claim until `sender.stamp_sender` has checked it."""

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
    """An envelope with exactly its eleven members, as most clients write it."""

    from_: str | None = msgspec.field(name="from")
    to: str | None = msgspec.field()
    payload: Raw = msgspec.field()
    pattern: Literal["tell", "ask"] = msgspec.field()
    correlation_id: str | None = msgspec.field(name="correlationId")
    metadata: Raw = msgspec.field()
    ttl: Annotated[int, Meta(ge=1, le=MILLIS_MAX)] | None = msgspec.field()
    signature: str | None = msgspec.field()


class _MemberTexts(msgspec.Struct, eq=False, gc=False):
    """The members as text, to add up their lengths."""

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
    """The envelope of a frame; raises HubError for the sender."""
    if len(frame) > bytes_max:
        raise HubError(
            "message_too_large",
            f"a message must have at most {bytes_max} bytes",
            {"messageSize": len(frame), "maxSize": bytes_max},
        )
    check_frame_text(frame)
    envelope = _parse_complete(frame)
    if envelope is None:
        envelope = _parse_any(frame)
    _check_envelope(envelope)
    return envelope


def _parse_complete(frame: bytes) -> Envelope | None:
    """Fast check for a frame of exactly the eleven members; None if it may be another.

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
                raise invalid_message(f"{name} must have at most {NAME_BYTES_MAX} bytes", field=name)
    metadata = envelope.metadata
    if metadata is EMPTY:
        return
    if len(metadata) > METADATA_BYTES_MAX:
        raise invalid_message(f"metadata must have at most {METADATA_BYTES_MAX} bytes", field="metadata")
    text = bytes(metadata)
    if text == b"null":
        envelope.metadata = EMPTY
    elif not text.startswith(b"{"):
        raise invalid_message("metadata must be an object", field="metadata")


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
