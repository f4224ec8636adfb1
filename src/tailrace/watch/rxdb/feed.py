"""Pages of changed documents, and the live feed of a collection for a replicating client.

Documents of a collection in the order of their last change, as one client of replication may see them.

Feeds: what a replicating client is told of one collection while it is connected, and how that reaches it.

A feed is a place in the order of changes and a task that moves it on. It reads the view at the client's pace,
so there is nothing that a slow client could make us keep for it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import orjson

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.watch import document
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import Document
from tailrace.watch.document_view import DocumentRow
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.predicate import Predicate
from tailrace.watch.query_execution import TimeSlice
from tailrace.watch.rxdb.protocol import DELETED_FIELD, PullCursor

if TYPE_CHECKING:
    from tailrace.watch.rxdb.replication import Replication


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


logger = logging.getLogger("tailrace.watch")

RECOVER: Final = 0.6
POLL_S: Final = 0.25
PULL_REMINDER_S: Final = 2.0
PUSH_QUIET_S: Final = 1.0  # without a push; a busy client may take half a second from one to the next
PUSH_QUIET_S_MAX: Final = 5.0  # a client that writes without end has to hear of others, too
RESYNC: Final = b'"RESYNC"'
# States of a collection in which what there is is right: not while a source loads, or cannot go on.
READABLE_STATES: Final = frozenset({"live", "lagging"})


class FeedListener(Protocol):
    """The end of a wire that a feed speaks to."""

    @property
    def identity(self) -> Identity: ...
    async def room(self) -> bool:
        """Waits until the client has taken enough; False if it is gone."""
        ...

    async def tell(self, feed: ReplicationFeed, result: bytes, pos: str | None) -> None: ...
    def fail(self, refusal: TailraceError) -> None: ...


class ReplicationTransport(ABC):
    """A connection whose client may be slow, silent, or allowed here no longer."""

    def __init__(self, replication: Replication, identity: Identity | None) -> None:
        self.replication = replication
        self.known: Identity | None = identity  # None until they said who they are
        self.drained = asyncio.Event()
        self.ended = False
        now = replication.context.loop.time()
        self.opened_at = now
        self._sent_bytes = 0
        self._taken_before = 0
        self._progress_at = now
        replication.opened(self)

    @property
    def identity(self) -> Identity:
        assert self.known is not None
        return self.known

    @property
    @abstractmethod
    def unsent_bytes(self) -> int: ...

    @abstractmethod
    def close(self, code: int, reason: str) -> None:
        """Sends the client away."""

    def drain(self) -> None:
        """The server is stopping."""
        self.close(1001, "the server is stopping")

    def gone(self) -> None:
        """The client left, or was sent away."""
        if not self.ended:
            self.ended = True
            self.drained.set()
            self.replication.closed(self)

    def counted(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes

    def on_drain(self) -> None:
        self.drained.set()

    async def room(self) -> bool:
        bytes_max = RECOVER * self.replication.limits.watch_outbound_bytes
        while not self.ended:
            if self.unsent_bytes <= bytes_max and not self.replication.is_crowded:
                return True
            self.drained.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.drained.wait(), POLL_S)
        return False

    def on_tick(self, now: float) -> None:
        limits = self.replication.limits
        unsent = self.unsent_bytes
        taken = self._sent_bytes - unsent
        if taken > self._taken_before or not unsent:
            self._taken_before, self._progress_at = taken, now
            self.drained.set()
        elif now - self._progress_at >= limits.watch_stall_ms / 1000:
            self.close(1013, "the connection takes nothing")
            return
        if self.known is None:
            if now - self.opened_at >= limits.watch_auth_ms / 1000:
                self.close(4401, "nobody said who they are")
        elif self.known.until_s is not None and self.replication.gateway.now_s() >= self.known.until_s:
            self.close(4401, "the token has expired")


class ReplicationFeed:
    """One collection for one client."""

    def __init__(
        self,
        replication: Replication,
        listener: FeedListener,
        database: str,
        name: str,
        shape: DocumentShape,
        limit: int,
        walk: PullCursor | None = None,
        *,
        joined: bool = True,
        client: object = None,
    ) -> None:
        self._replication = replication
        self._listener = listener
        self.database = database
        self.name = name
        self._shape = shape
        self._limit = limit
        self.client = client  # who pushes as this feed's client does
        self.pushed_at = -inf
        self.woken = asyncio.Event()
        self.doubtful = False  # what the client came with cannot be gone on from
        # Whether the client has pulled since the feed began. RxDB pulls when it has connected, but not if it
        # still had something to do from the connection before: then what happened in between is lost to it.
        self.joined = joined
        self._began = replication.context.loop.time()
        # What the client has pulled on the same connection, as far as we know.
        self.pulled: PullCursor | None = None
        collection = replication.find(database, name)
        if walk is None and collection is not None:
            walk = replication.tail(listener.identity, collection)
        self.walk = walk  # None as long as there is no collection
        self._since = [] if walk is None else list(walk.seqs)

    async def run(self) -> None:
        try:
            while await self._listener.room():
                self.woken.clear()
                await self._calm()
                if not await self._step():
                    await self.woken.wait()
        except TailraceError as refusal:
            self._listener.fail(refusal)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a replication feed failed")
            self._listener.fail(TailraceError("internal", "the feed failed"))

    async def _calm(self) -> None:
        """Waits while the client itself is writing.

        RxDB holds events back while it pushes and applies them afterwards. One of the state before would put
        the document back to that state, and the next edit, made on top of it, would conflict with this one.
        """
        loop = self._replication.context.loop
        begun = loop.time()
        while (wait_s := min(self.pushed_at + PUSH_QUIET_S, begun + PUSH_QUIET_S_MAX) - loop.time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    async def _step(self) -> bool:
        """Sends what comes next; False if there is nothing."""
        replication = self._replication
        collection = replication.find(self.database, self.name)
        if collection is None:
            return await self._vanished()
        if collection.state not in READABLE_STATES:
            return False  # it is told when that changes
        identity = self._listener.identity
        if self.walk is None:
            # It came into being while we waited: everything in it is news.
            fresh = replication.tail(identity, collection)
            self.walk, self.joined = fresh.moved([0] * len(fresh.seqs)), True
            self._since = list(self.walk.seqs)
        missed = not self.joined and self.walk.seqs != collection.applied
        if self.doubtful or missed or self._is_doubtful(collection, identity):
            self.doubtful, self.joined = False, True
            self.walk = replication.tail(identity, collection)
            self._since = list(self.walk.seqs)
            await self._resync()
            return True
        documents, listed = await replication.batch(identity, collection, self._shape, self.walk, self._limit)
        self.walk = listed.walk
        if not documents:
            return False
        checkpoint = replication.shown(self._covered(self.walk), listed.last)
        result = b'{"documents":[%b],"checkpoint":%b}' % (b",".join(documents), orjson.dumps(checkpoint))
        await self._listener.tell(self, result, checkpoint["pos"])
        return True

    def remind(self, now: float) -> None:
        """A client that has not pulled for a while is told to: it does not know where it is."""
        if not self.joined and now - self._began >= PULL_REMINDER_S:
            self.doubtful = True
            self.woken.set()

    @property
    def is_up_to_date(self) -> bool:
        collection = self._replication.find(self.database, self.name)
        return self.walk is not None and collection is not None and self.walk.seqs == collection.applied

    async def _vanished(self) -> bool:
        """The collection is not there, or no longer: whoever has something of it has to be told."""
        if self.walk is None:
            return False
        self.walk = None
        await self._resync()
        return True

    async def _resync(self) -> None:
        self.pulled = None
        self._replication.resyncs += 1
        await self._listener.tell(self, RESYNC, None)

    def _is_doubtful(self, collection: Collection, identity: Identity) -> bool:
        """Whether the client could be missing something that will never come by here."""
        walk = self.walk
        assert walk is not None
        fresh = self._replication.tail(identity, collection)
        if (walk.generation, walk.digest, len(walk.seqs)) != (
            fresh.generation,
            fresh.digest,
            len(fresh.seqs),
        ):
            return True
        if walk.seqs == fresh.seqs:
            return False
        purged = self._replication.book.view.now.purged(collection.number, len(walk.seqs))
        return walk.misses([one.seq for one in purged])

    def _covered(self, walk: PullCursor) -> PullCursor:
        """What the client has by pulling and by this feed together: a hole between the two is not skipped."""
        pulled = self.pulled
        if pulled is None or len(pulled.seqs) != len(walk.seqs):
            return walk
        whole = zip(walk.seqs, pulled.seqs, self._since, strict=True)
        return pulled.moved([max(own, got) if got >= since else got for own, got, since in whole])
