"""Documents of a collection in the order of their last change, as one client of replication may see them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import orjson

from tailrace.auth import Identity
from tailrace.watch import document
from tailrace.watch.access import AccessRules
from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import Collection
from tailrace.watch.document import Document
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.predicate import Predicate
from tailrace.watch.query_execution import TimeSlice
from tailrace.watch.rxdb.checkpoint import PullCursor
from tailrace.watch.rxdb.push import DELETED_FIELD
from tailrace.watch.view import DocumentRow

SCAN_ROWS: Final = 200  # between two looks at what else the loop has to do
PIECE_BYTES: Final = 64 * 1024
_STAMPS: Final = ("collection", "version", "createdAt", "updatedAt")


class DocumentShape(NamedTuple):
    """How a client wants its documents."""

    deleted_field: str = DELETED_FIELD
    stamps: bool = True  # with collection, version, createdAt and updatedAt

    def of(self, flat: Document, deleted: bool) -> Document:
        found = {name: value for name, value in flat.items() if self.stamps or name not in _STAMPS}
        found[self.deleted_field] = deleted
        return found


class ChangeKey(NamedTuple):
    """The place of a document at its last change."""

    partition: int
    seq: int
    updated_ms: int


class PageKeys(NamedTuple):
    """What a page holds, by id; the documents are read when they are sent."""

    keys: dict[str, ChangeKey]
    walk: PullCursor

    @property
    def last(self) -> tuple[int, str]:
        """Time and id of the last document."""
        document_id = next(reversed(self.keys))
        return self.keys[document_id].updated_ms, document_id


class FeedBatch(NamedTuple):
    documents: list[bytes]
    listed: PageKeys


class ChangePages:
    """One collection in one asker's eyes."""

    def __init__(
        self,
        book: CollectionRegistry,
        access: AccessRules,
        identity: Identity,
        collection: Collection,
        shape: DocumentShape,
    ) -> None:
        self._book = book
        self._access = access
        self._identity = identity
        self._collection = collection
        self._shape = shape
        self._ruled = -1  # the version of the rule
        self._rule: Predicate | None = None

    async def listed(self, walk: PullCursor, limit: int) -> PageKeys:
        """The next `limit` documents behind the walk; fewer only if there are no more at this moment."""
        collection, view = self._collection, self._book.view
        seqs = list(walk.seqs)
        keys: dict[str, ChangeKey] = {}
        time_slice = TimeSlice()
        while len(keys) < limit:
            self._book.check_applied(collection)
            pending = [place for place, seq in enumerate(seqs) if seq < collection.applied[place]]
            if not pending:
                break
            # Everybody's turn comes, also if a page has fewer documents than there are partitions.
            first = sum(seqs) % len(pending)
            share = min(SCAN_ROWS, -(-(limit - len(keys)) // len(pending)))
            for partition in pending[first:] + pending[:first]:
                if len(keys) == limit:
                    break
                rows = view.now.changed_after(collection.number, partition, seqs[partition], share)
                tail = collection.applied[partition]
                for document_id, seq, updated_ms in rows:
                    if len(keys) == limit:
                        break
                    if time_slice.is_over:
                        await time_slice.give_way()
                    seqs[partition] = seq
                    if walk.is_new(partition, seq) or self._is_shown(document_id):
                        # One that changes while the page is put together is in it once, where it is now.
                        keys.pop(document_id, None)
                        keys[document_id] = ChangeKey(partition, seq, updated_ms)
                else:
                    if len(rows) < share:
                        seqs[partition] = tail
        return PageKeys(keys, walk.moved(seqs))

    async def batch(self, walk: PullCursor, limit: int, bytes_max: int) -> FeedBatch:
        """The next documents, at least one if there is one, and no more than fit."""
        listed = await self.listed(walk, limit)
        documents: list[bytes] = []
        kept: dict[str, ChangeKey] = {}
        seqs = list(walk.seqs)
        size, time_slice = 0, TimeSlice()
        for document_id, key in listed.keys.items():
            if time_slice.is_over:
                await time_slice.give_way()
            raw = self.encoded(document_id)
            if documents and size + len(raw) > bytes_max:
                return FeedBatch(documents, PageKeys(kept, walk.moved(seqs)))
            kept[document_id] = key
            seqs[key.partition] = max(seqs[key.partition], key.seq)
            documents.append(raw)
            size += len(raw)
        return FeedBatch(documents, listed)

    async def pieces(self, listed: PageKeys, head: bytes, tail: bytes) -> AsyncIterator[bytes]:
        """The documents of a page as a JSON array between `head` and `tail`, never much at once."""
        gathered, size = [head, b"["], 0
        comma, time_slice = b"", TimeSlice()
        for document_id in listed.keys:
            if time_slice.is_over:
                await time_slice.give_way()
            raw = self.encoded(document_id)
            gathered += (comma, raw)
            size += len(raw)
            comma = b","
            if size >= PIECE_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
                await time_slice.give_way()
        gathered += (b"]", tail)
        yield b"".join(gathered)

    def encoded(self, document_id: str) -> bytes:
        """A document as it is now. One that is not for this reader, or that is forgotten, is deleted."""
        row = self._book.view.find(self._collection.number, document_id)
        flat = None if row is None else self._flat(row)
        if row is None or flat is None or not self._readable(flat):
            replicated = self._collection.config.replication
            fields = {} if replicated is None else replicated.tombstone_fields
            return orjson.dumps({**fields, "id": document_id, self._shape.deleted_field: True})
        return orjson.dumps(self._shape.of(flat, bool(row.deleted)))

    def _flat(self, row: DocumentRow) -> Document:
        data: Document = orjson.loads(row.data)
        name = self._collection.name
        return document.flatten_document(data, row.id, name, row.version, row.created_ms, row.updated_ms)

    def _is_shown(self, document_id: str) -> bool:
        if self._collection.config.read_rule is None:
            return True
        row = self._book.view.find(self._collection.number, document_id)
        return row is not None and self._readable(self._flat(row))

    def _readable(self, flat: dict[str, Any]) -> bool:
        """By the rule of this moment: a page may take longer to send than the rule lasts."""
        config = self._collection.config
        if config.rule_version != self._ruled:
            self._ruled = config.rule_version
            part = self._access.read_part(self._identity, self._collection)
            self._rule = None if part is None else Predicate([part])
        if self._rule is None:
            return True
        try:
            return self._rule.matches(flat)
        except CostExceededError:
            return False
