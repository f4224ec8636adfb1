"""Documents: what may be written, and the flat form that predicates and clients see."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn, cast

import orjson

from tailrace.common.errors import TailraceError

DEPTH_MAX: Final = 64
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
RESERVED_FIELDS: Final = frozenset({"id", "collection", "version", "createdAt", "updatedAt", "deleted"})

Document = dict[str, Any]


def load(body: bytes, bytes_max: int) -> Document:
    """A document as it was sent: one JSON object, no key twice, within the bounds."""
    return check(parse_json(body, bytes_max))


def parse_json(body: bytes, bytes_max: int) -> object:
    """JSON in which no key comes twice; what documents it holds has to be checked."""
    if len(body) > bytes_max:
        raise TailraceError("payload_too_large", f"a document has at most {bytes_max} bytes")
    try:
        return json.loads(body, object_pairs_hook=_object, parse_constant=_not_json)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise TailraceError("invalid_json", f"the document is not JSON: {error}") from None


def check(value: object) -> Document:
    """A value as a document, its numbers in the two forms there are: int64 and double."""
    if not isinstance(value, dict):
        raise TailraceError("invalid_request", "a document is a JSON object")
    return cast("Document", _normalize_numbers(cast("Document", value), DEPTH_MAX))


def check_fields(document: Document, document_id: str) -> Document:
    """User data without the names that are the server's; the id may be there if it is the right one."""
    for name in document:
        if name in RESERVED_FIELDS or name.startswith("_"):
            if name == "id" and document["id"] == document_id:
                continue
            raise TailraceError("reserved_field", f"the field {name!r} is the server's")
    if "id" in document:
        return {name: value for name, value in document.items() if name != "id"}
    return document


def dump(document: Document, bytes_max: int) -> bytes:
    try:
        raw = orjson.dumps(document)
    except (orjson.JSONEncodeError, TypeError):
        raise TailraceError("invalid_json", "the document holds text that is not Unicode") from None
    if len(raw) > bytes_max:
        raise TailraceError("payload_too_large", f"a document has at most {bytes_max} bytes")
    return raw


def merge_patch(target: object, patch: object) -> object:
    """A merge patch (RFC 7396): null removes, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged: Document = dict(cast("Document", target)) if isinstance(target, dict) else {}
    for name, value in cast("Document", patch).items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def flatten_document(
    data: Mapping[str, Any], document_id: str, collection: str, version: int, created_ms: int, updated_ms: int
) -> Document:
    """The document as predicates see it. A field that has a name of the server's becomes `src_...`."""
    found: Document = {}
    for name, value in data.items():
        found[f"src_{name}" if name in RESERVED_FIELDS or name.startswith("_") else name] = value
    found["id"] = document_id
    found["collection"] = collection
    found["version"] = version
    found["createdAt"] = created_ms
    found["updatedAt"] = updated_ms
    return found


def _object(pairs: list[tuple[str, Any]]) -> Document:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise TailraceError("invalid_json", "the document has a key twice")
    return found


def _not_json(text: str) -> NoReturn:
    raise TailraceError("invalid_json", f"{text} is not JSON")


def _normalize_numbers(value: Any, depth: int) -> Any:
    if type(value) is int:
        return value if INT_MIN <= value <= INT_MAX else _double(value)
    if type(value) is float and not math.isfinite(value):
        raise TailraceError("invalid_json", "a number is out of range")
    if type(value) is dict:
        if depth == 0:
            raise _too_deep()
        items = cast("Document", value).items()
        return {name: _normalize_numbers(item, depth - 1) for name, item in items}
    if type(value) is list:
        if depth == 0:
            raise _too_deep()
        return [_normalize_numbers(item, depth - 1) for item in cast("list[Any]", value)]
    return value


def _double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise TailraceError("invalid_json", "a number is out of range") from None


def _too_deep() -> TailraceError:
    return TailraceError("invalid_json", f"a document is nested at most {DEPTH_MAX} levels deep")
