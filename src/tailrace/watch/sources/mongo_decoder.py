"""MongoDB decoding: BSON values as JSON, change events and resume tokens. Requires the driver."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

import bson
import orjson
from bson import json_util
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from tailrace.common.timestamps import format_rfc3339_ms
from tailrace.watch.sources.model import ImageKind, SourceChange, SourceError

DEPTH_MAX: Final = 60  # of one value; documents have at most 64 levels
KEY_BYTES_MAX: Final = 1024

# No value may stop a source: invalid UTF-8, dates BC, ids of any type.
_OPTIONS: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    document_class=dict,
    uuid_representation=UuidRepresentation.UNSPECIFIED,
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_MS,
)
_RELAXED: Final = json_util.RELAXED_JSON_OPTIONS
_CANONICAL: Final = json_util.CANONICAL_JSON_OPTIONS
_PLAIN: Final = frozenset({str, int, bool, type(None)})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS_MIN: Final = -62_135_596_800_000  # the year 1
_MS_MAX: Final = 253_402_300_799_999  # the year 9999


def decode_bson(raw: bytes) -> dict[str, Any]:
    return bson.decode(raw, _OPTIONS)  # pyright: ignore[reportUnknownMemberType]


def document_row(document: Mapping[str, Any]) -> tuple[str, bytes]:
    """The key and JSON of a MongoDB document."""
    return document_key(document["_id"]), document_data(document)


def document_data(document: Mapping[str, Any]) -> bytes:
    """The document without `_id`, which is its key."""
    return orjson.dumps(
        {name: json_value(value, DEPTH_MAX) for name, value in document.items() if name != "_id"}
    )


def document_key(value: object) -> str:
    """Strings unchanged, object ids in hex, all else as canonical extended JSON."""
    if isinstance(value, ObjectId) or (isinstance(value, str) and value):
        key = str(value)
    else:
        key = _text(value, _CANONICAL)
    if len(key.encode()) > KEY_BYTES_MAX:
        raise SourceError(f"the _id of a document has more than {KEY_BYTES_MAX} bytes: {key[:40]}...")
    return key


def json_value(value: Any, depth: int) -> Any:
    """The value as JSON; what is nested too deep becomes a string."""
    kind = cast("type[Any]", type(value))
    if kind in _PLAIN:
        return value
    if kind is dict or kind is list:
        if depth == 0:
            return _text(value, _RELAXED)
        if kind is list:
            return [json_value(item, depth - 1) for item in value]
        return {name: json_value(item, depth - 1) for name, item in value.items()}
    if kind is float and math.isfinite(value):
        return value
    if kind is Int64:
        return int(value)
    if kind is ObjectId or kind is Decimal128:
        return str(value)
    if isinstance(value, bytes):  # of any subtype
        return base64.b64encode(value).decode()
    if kind is DatetimeMS and _MS_MIN <= int(value) <= _MS_MAX:
        return format_rfc3339_ms(int(value))
    return json.loads(_text(value, _RELAXED))


def _text(value: object, options: json_util.JSONOptions) -> str:
    return json_util.dumps(value, json_options=options, separators=(",", ":"), ensure_ascii=False)


# A token starts with the type of a timestamp, its seconds and its counter.
_TOKEN: Final = re.compile(r"82([0-9A-Fa-f]{16})")
# Then its version and kind: of an event, or of a time without event.
_EVENT_TOKEN: Final = re.compile(r"82[0-9A-Fa-f]{16}2[Bb]0[0-9A-Fa-f]2[Cc]")
TOKEN_BYTES_MAX: Final = 16 * 1024


class MongoDecoder:
    """Decodes the change stream of one collection in order, after the change at `lsn` and `ordinal`.

    The changes of one transaction have the same time and are distinguished by their number; a stream that is
    resumed within a transaction continues to count.
    """

    def __init__(self, collection: str, lsn: int, ordinal: int) -> None:
        self._collection = collection
        self._lsn = lsn
        self._ordinal = ordinal
        self.end_token = ""  # set when the stream ended: the collection was dropped or renamed

    def feed(self, raw: bytes) -> SourceChange | None:
        """The change of one event; None if it is not about a document."""
        event = decode_bson(raw)
        kind = event["operationType"]
        if kind == "invalidate":
            self.end_token = encode_resume_token(event["_id"])
            return None
        if kind not in ("insert", "update", "replace", "delete"):
            return None  # such as a drop, which ends the stream with the next event
        lsn, token = _time_of(event), encode_resume_token(event["_id"])
        self._ordinal = self._ordinal + 1 if lsn == self._lsn else 0
        self._lsn = lsn
        key, txn, time = (
            document_key(event["documentKey"]["_id"]),
            _transaction_of(event),
            _instant_of(event, lsn),
        )
        if kind == "delete":
            change = SourceChange(lsn, self._ordinal, txn, time, "delete", self._collection, key)
        else:
            full = event.get("fullDocument")
            data = b"" if full is None else document_data(full)
            # An update has the document at the time of the lookup, which was later.
            image: ImageKind = "missing" if full is None else "lookup" if kind == "update" else "full"
            change = SourceChange(lsn, self._ordinal, txn, time, "put", self._collection, key, data)
            change = change._replace(image=image, replaces=kind == "replace")
        before = event.get("fullDocumentBeforeChange")
        return change._replace(token=token, before=None if before is None else document_data(before))


def encode_resume_token(token: Mapping[str, Any]) -> str:
    """A resume token as text."""
    data = token.get("_data")
    text = data if isinstance(data, str) and len(token) == 1 else json_util.dumps(dict(token))
    if len(text) > TOKEN_BYTES_MAX:
        raise SourceError(f"a resume token has more than {TOKEN_BYTES_MAX} bytes")
    return text


def decode_resume_token(text: str) -> dict[str, Any]:
    return json_util.loads(text) if text.startswith("{") else {"_data": text}


def token_lsn(text: str) -> int:
    """The cluster time of a token."""
    found = _TOKEN.match(str(decode_resume_token(text).get("_data")))
    if found is None:
        raise SourceError("unknown form of resume token, MongoDB 4.4 or newer is required")
    return int(found[1], 16)


def is_event_token(text: str) -> bool:
    """Whether a token is after an event, not before all events of its time."""
    return _EVENT_TOKEN.match(str(decode_resume_token(text).get("_data"))) is not None


def timestamp_lsn(time: Timestamp) -> int:
    return time.time << 32 | time.inc


def _time_of(event: Mapping[str, Any]) -> int:
    time = event.get("clusterTime")
    return (
        timestamp_lsn(time) if isinstance(time, Timestamp) else token_lsn(encode_resume_token(event["_id"]))
    )


def _instant_of(event: Mapping[str, Any], lsn: int) -> str:
    """The commit time; older servers only have seconds."""
    time = event.get("wallTime")
    return format_rfc3339_ms(int(time) if isinstance(time, DatetimeMS) else (lsn >> 32) * 1000)


def _transaction_of(event: Mapping[str, Any]) -> str | None:
    number, session = event.get("txnNumber"), event.get("lsid")
    if number is None or session is None:
        return None
    return f"{bytes(session['id']).hex()}:{int(number)}"
