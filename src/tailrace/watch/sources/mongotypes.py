"""Values of MongoDB as JSON: from what the driver decodes to what a document holds."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
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

from tailrace.watch.sources.model import SourceError

DEPTH_MAX: Final = 60  # of one value: a document is nested at most 64 levels deep
KEY_BYTES_MAX: Final = 1024

# Nothing that a document holds stops its source: texts that are none, dates before Christ, ids of any kind.
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
    """A whole document of MongoDB: the key and the document that it is here."""
    return document_key(document["_id"]), document_data(document)


def document_data(document: Mapping[str, Any]) -> bytes:
    """The id is not part of it: it is the key."""
    return orjson.dumps(
        {name: json_value(value, DEPTH_MAX) for name, value in document.items() if name != "_id"}
    )


def document_key(value: object) -> str:
    """Texts as they are, object ids in hex, all else as canonical extended JSON."""
    if isinstance(value, ObjectId) or (isinstance(value, str) and value):
        key = str(value)
    else:
        key = _text(value, _CANONICAL)
    if len(key.encode()) > KEY_BYTES_MAX:
        raise SourceError(f"the _id of a document has more than {KEY_BYTES_MAX} bytes: {key[:40]}...")
    return key


def json_value(value: Any, depth: int) -> Any:
    """What is nested deeper than a document can be becomes a text."""
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
        return format_instant_ms(int(value))
    return json.loads(_text(value, _RELAXED))


def format_instant_ms(time_ms: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03d}Z".rjust(24, "0")


def _text(value: object, options: json_util.JSONOptions) -> str:
    return json_util.dumps(value, json_options=options, separators=(",", ":"), ensure_ascii=False)
