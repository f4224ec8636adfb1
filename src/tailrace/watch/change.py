"""A change: one committed write to one document, as it stands in the log."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
import orjson

from tailrace.watch.document import Document, flatten_document

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
    def is_half(self) -> bool:
        """Whether the entry leaves out what the document was before: the view knew it at that time."""
        entry = self.entry
        return entry.images.before == "view" and entry.before == RAW_NULL

    def complete(self, before: bytes) -> None:
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
            if self.is_half:
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
