"""Documents and changes: validation, the flat form that predicates see, and entries of change streams.

A change is one committed write to one document.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NoReturn, cast

import msgspec
import orjson

from tailrace.common.errors import TailraceError

DEPTH_MAX: Final = 64
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
RESERVED_FIELDS: Final = frozenset({"id", "collection", "version", "createdAt", "updatedAt", "deleted"})

Document = dict[str, Any]


def load(body: bytes, bytes_max: int) -> Document:
    """Parse a document: one JSON object without duplicate keys, within the limits."""
    return check(parse_json(body, bytes_max))


def parse_json(body: bytes, bytes_max: int) -> object:
    """Parse JSON without duplicate keys; documents in it must be validated with `check`."""
    if len(body) > bytes_max:
        raise TailraceError("payload_too_large", f"a document must have at most {bytes_max} bytes")
    try:
        return json.loads(body, object_pairs_hook=_object, parse_constant=_not_json)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise TailraceError("invalid_json", f"the document is not JSON: {error}") from None


def check(value: object) -> Document:
    """Validate a document and normalize its numbers to int64 and double."""
    if not isinstance(value, dict):
        raise TailraceError("invalid_request", "a document must be a JSON object")
    return cast("Document", _normalize_numbers(cast("Document", value), DEPTH_MAX))


def check_fields(document: Document, document_id: str) -> Document:
    """Reject reserved field names; `id` is allowed if it equals the document's id."""
    for name in document:
        if name in RESERVED_FIELDS or name.startswith("_"):
            if name == "id" and document["id"] == document_id:
                continue
            raise TailraceError("reserved_field", f"the field {name!r} is reserved")
    if "id" in document:
        return {name: value for name, value in document.items() if name != "id"}
    return document


def dump(document: Document, bytes_max: int) -> bytes:
    try:
        raw = orjson.dumps(document)
    except (orjson.JSONEncodeError, TypeError):
        raise TailraceError("invalid_json", "the document has strings that are not valid Unicode") from None
    if len(raw) > bytes_max:
        raise TailraceError("payload_too_large", f"a document must have at most {bytes_max} bytes")
    return raw


def merge_patch(target: object, patch: object) -> object:
    """Apply a merge patch (RFC 7396): null removes, objects merge, all else replaces."""
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
    """The document as predicates see it; user fields with reserved names become `src_...`."""
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
        raise TailraceError("invalid_json", "the document has a duplicate key")
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
    return TailraceError("invalid_json", f"a document must have at most {DEPTH_MAX} levels")


ChangeOp = Literal["insert", "update", "replace", "delete"]

RAW_NULL: Final = msgspec.Raw(b"null")


IMAGE_MISSING: Final = "missing"


class ChangeImages(msgspec.Struct, frozen=True):
    """Origin of the images.

    before: full (from the source), view, or none. after: full; lookup (read from the source later); missing
    (deleted before the lookup); none.
    """

    before: str
    after: str


class PreviousVersion(msgspec.Struct, frozen=True):
    version: int
    updatedAt: int  # noqa: N815 - the name on the wire


class TransactionRef(msgspec.Struct, frozen=True):
    id: str | None
    index: int


class ChangeSource(msgspec.Struct, frozen=True):
    kind: str = "native"
    name: str | None = None
    token: str | None = None


NATIVE_SOURCE: Final = ChangeSource()


class ChangeEntry(msgspec.Struct, frozen=True):
    """The entry of a change stream; the images stay encoded until they are used."""

    database: str
    collection: str
    documentKey: str  # noqa: N815 - as above
    op: ChangeOp
    before: msgspec.Raw
    after: msgspec.Raw
    images: ChangeImages
    version: int
    createdAt: int  # noqa: N815 - as above
    prev: PreviousVersion | None
    txn: TransactionRef | None
    commitTime: str  # noqa: N815 - as above
    writeId: str | None = None  # noqa: N815 - as above
    source: ChangeSource = NATIVE_SOURCE
    # Digest of the request, to distinguish a repeat from another request with the same key.
    writeDigest: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815 - as above
    lsn: str | msgspec.UnsetType = msgspec.UNSET  # of the source; unset for native changes
    v: int = 1
    kind: str = "change"


class BeforeUnknownError(Exception):
    """The before-image of a change is neither in the log nor cached."""


class _EntryKind(msgspec.Struct):
    kind: str = "change"


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ChangeEntry).decode
_decode_kind = msgspec.json.Decoder(_EntryKind).decode


class Change:
    """A change with its position in the log; its images are decoded on first use."""

    __slots__ = ("_after", "_before", "entry", "partition", "seq", "updated_ms")

    def __init__(self, entry: ChangeEntry, partition: int, seq: int, updated_ms: int) -> None:
        self.entry = entry
        self.partition = partition
        self.seq = seq
        self.updated_ms = updated_ms
        self._before: Document | Literal[False] | None = False
        self._after: Document | Literal[False] | None = False

    @property
    def lsn(self) -> str | None:
        """The position at the source; None for a native change."""
        found = self.entry.lsn
        return found if isinstance(found, str) else None

    @property
    def lacks_before_image(self) -> bool:
        """Whether the entry omits the before-image (store_before is off)."""
        entry = self.entry
        return entry.images.before == "view" and entry.before == RAW_NULL

    def set_before_image(self, before: bytes) -> None:
        self.entry = msgspec.structs.replace(self.entry, before=msgspec.Raw(before))

    @property
    def before(self) -> Document | None:
        """The flat document before the change, None if there was none."""
        if self._before is False:
            entry, prev = self.entry, self.entry.prev
            if entry.op == "insert" or prev is None:
                self._before = None
                return None
            if self.lacks_before_image:
                raise BeforeUnknownError(
                    f"{entry.collection} does not store documents before a change (storeBefore)"
                )
            data: Document = orjson.loads(bytes(entry.before))
            self._before = flatten_document(
                data, entry.documentKey, entry.collection, prev.version, entry.createdAt, prev.updatedAt
            )
        return self._before

    @property
    def after(self) -> Document | None:
        """The flat document after the change, None if there is none."""
        if self._after is False:
            self._after = None
            entry = self.entry
            if entry.op != "delete":
                data: Document = orjson.loads(bytes(entry.after))
                self._after = flatten_document(
                    data,
                    entry.documentKey,
                    entry.collection,
                    entry.version,
                    entry.createdAt,
                    self.updated_ms,
                )
        return self._after


def encode_change(entry: ChangeEntry) -> bytes:
    return _encode(entry)


def decode_change(raw: bytes | memoryview, partition: int, seq: int, time_ns: int) -> Change | None:
    """The change of an entry; None for entries that readers skip.

    These are entries of other kinds, and changes without an after-image because the document was deleted
    before it was looked up; its deletion follows.
    """
    try:
        entry = _decode(raw)
    except msgspec.ValidationError:
        if _decode_kind(raw).kind == "change":
            raise
        return None
    if entry.kind != "change" or entry.images.after == IMAGE_MISSING:
        return None
    return Change(entry, partition, seq, time_ns // 1_000_000)


def client_document(
    collection: str,
    document_id: str,
    data: Any,
    version: int,
    created_ms: int | None,
    updated_ms: int,
) -> dict[str, Any]:
    """A document as it is sent to clients; `data` may be raw JSON already."""
    found: dict[str, Any] = {
        "path": f"{collection}/{document_id}",
        "id": document_id,
        "collection": collection,
        "data": data,
        "version": version,
    }
    if created_ms is not None:
        found["createdAt"] = created_ms
    found["updatedAt"] = updated_ms
    return found
