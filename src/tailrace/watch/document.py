"""Documents and changes: validation, the flat form that predicates see, and the entries of change streams.

Documents: what may be written, and the flat form that predicates and clients see.

A change: one committed write to one document, as it stands in the log.
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


ChangeOp = Literal["insert", "update", "replace", "delete"]

RAW_NULL: Final = msgspec.Raw(b"null")


IMAGE_MISSING: Final = "missing"


class ChangeImages(msgspec.Struct, frozen=True):
    """Where the images are from.

    before: the source (full), the view, or none. after: full; lookup, as the source had it when it was asked
    later; missing, as it was gone by then; none.
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
    """The entry of a change stream. The images stay as they were written until somebody looks at them."""

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
    # What was asked for under that key, so that something else under it is told apart from a repeat.
    writeDigest: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815 - as above
    lsn: str | msgspec.UnsetType = msgspec.UNSET  # of the source; a native change has its own offset
    v: int = 1
    kind: str = "change"


class BeforeUnknownError(Exception):
    """The log does not say what the document was before the change, and nobody remembers."""


class _EntryKind(msgspec.Struct):
    kind: str = "change"


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ChangeEntry).decode
_decode_kind = msgspec.json.Decoder(_EntryKind).decode


class Change:
    """A change with its place in the log, and its two images when they are asked for."""

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
        """Whether the entry leaves out what the document was before: the view knew it at that time."""
        entry = self.entry
        return entry.images.before == "view" and entry.before == RAW_NULL

    def set_before_image(self, before: bytes) -> None:
        """Says what the document was."""
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
                    f"{entry.collection} keeps no documents as they were before a change (storeBefore)"
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
    """The change of an entry; None for what readers pass over.

    That is entries of other kinds, and changes of which nobody can say what they made of the document: it was
    gone when it was looked up, and that it is gone is the next that is said of it.
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
