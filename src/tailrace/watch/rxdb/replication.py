"""The replication service: pull, push and feeds of all replicating clients.

Pushes of replicating clients: each row is decided when its turn has come in the order of writes.

Replication with clients that hold documents themselves: what its routes share.

A client pulls what changed since its checkpoint, pushes what it changed, and is told of what others change.
All of it is about the view: a document that changed ten times is sent once, as it is now.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, NamedTuple

import orjson

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.log.transaction import Transaction
from tailrace.routing.context import Context
from tailrace.watch import document, names
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import Document
from tailrace.watch.document_writer import DocumentState, DocumentWrite, DocumentWriter, WriteResult
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.resume_tokens import KEY_BYTES, KeyRing, SigningKey, TokenSigner
from tailrace.watch.rxdb import protocol as checkpoints
from tailrace.watch.rxdb.feed import (
    READABLE_STATES,
    ChangePages,
    DocumentShape,
    FeedBatch,
    ReplicationFeed,
    ReplicationTransport,
)
from tailrace.watch.rxdb.protocol import LATE_MS, Checkpoint, PullCursor, PushRow, decide_push

STATUS_CONFLICT: Final = 409
STATUS_UNCHANGED: Final = 304

# Told the documents that the client has to look at, or why nothing was done at all.
PushCallback = Callable[[list[Document], TailraceError | None], None]


class PushHandler:
    """All pushes of a server."""

    def __init__(self, writer: DocumentWriter, access: AccessRules) -> None:
        self._writer = writer
        self._access = access
        self.rows = {"written": 0, "same": 0, "conflict": 0, "refused": 0}

    def push(
        self,
        identity: Identity,
        database: str,
        name: str,
        rows: list[PushRow],
        shape: DocumentShape,
        told: PushCallback,
    ) -> None:
        """Submits what is accepted as one record; `told` comes when what it says is durable."""
        if not rows:
            told([], None)
            return
        conflicts: list[Document] = []
        writes = [
            _PushedWrite(self._access, identity, database, name, row, shape, conflicts).write for row in rows
        ]

        def answer(results: list[WriteResult], error: TailraceError | None) -> None:
            # One row that the rules refuse refuses the push: nothing of it was submitted.
            refusal = error or next((one.error for one in results if one.error is not None), None)
            if refusal is not None:
                self.rows["refused"] += len(results)
                told([], refusal)
                return
            same = sum(result.status == STATUS_UNCHANGED for result in results)
            self._writer.note_repeats(database, name, "push", same)
            for result in results:
                kind = (
                    "conflict"
                    if result.status == STATUS_CONFLICT
                    else "same"
                    if result.status == STATUS_UNCHANGED
                    else "written"
                )
                self.rows[kind] += 1
            told(conflicts, None)

        self._writer.write(database, writes, self._access.writing(identity), answer, atomic=True)


class _PushedWrite:
    """One row, and what it is told if it loses."""

    def __init__(
        self,
        access: AccessRules,
        identity: Identity,
        database: str,
        name: str,
        row: PushRow,
        shape: DocumentShape,
        conflicts: list[Document],
    ) -> None:
        self._access = access
        self._identity = identity
        self._row = row
        self._shape = shape
        self._conflicts = conflicts
        path = names.split_document_path(f"{names.check_collection(name)}/{row.id}")
        self._path = f"{path.collection}/{path.id}"
        op = "delete" if row.deleted else "put"
        self.write = DocumentWrite(op, path, row.content, judge=self._judge, buries=row.deleted)

    def _judge(self, collection: Collection, state: DocumentState | None) -> WriteResult | None:
        row = self._row
        current: Document | None = None if state is None else orjson.loads(state.data)
        verdict = decide_push(current, state is not None and state.deleted, row)
        if verdict in ("insert", "replace"):
            return None
        flat = self._flat(collection, current, state)
        readable = flat is not None and self._access.readable(self._identity, collection, flat)
        if verdict == "same":
            if not readable:
                # Whoever cannot read it must not learn by guessing either.
                self._check(collection, state, flat)
            assert state is not None
            return WriteResult(self._path, STATUS_UNCHANGED, state.version, state.updated_ms)
        self._check(collection, state, flat)
        shown = flat if readable and flat is not None else {**row.content, "id": row.id}
        gone = state is None or state.deleted or not readable
        self._conflicts.append(self._shape.of(shown, gone))
        return WriteResult(self._path, STATUS_CONFLICT)

    def _check(self, collection: Collection, state: DocumentState | None, flat: Document | None) -> None:
        """The write rule comes before everything that could tell something."""
        row = self._row
        new = document.flatten_document(row.content, row.id, collection.name, 0, 0, 0)
        lives = state is not None and not state.deleted
        check = self._access.writing(self._identity)
        if row.deleted:
            check(collection, "delete", flat if lives else new, None)
        else:
            check(collection, "update" if lives else "create", flat if lives else None, new)

    def _flat(
        self, collection: Collection, data: Document | None, state: DocumentState | None
    ) -> Document | None:
        if data is None or state is None:
            return None
        return document.flatten_document(
            data, self._row.id, collection.name, state.version, state.created_ms, state.updated_ms
        )


LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 1000
TICK_S: Final = 1.0
SOFT: Final = 0.7
REPLICATION_KEY_FACT: Final = "secret/replication-key"
BATCHES_CACHED_MAX: Final = 8


class PullRequest(NamedTuple):
    """What a client asks for."""

    database: str
    name: str
    given: Any  # the checkpoint as it came
    checkpoint: Checkpoint | None
    limit: int
    shape: DocumentShape


class PullResult(NamedTuple):
    """A page, and how far the client is when it has it."""

    pieces: AsyncIterator[bytes]
    walk: PullCursor | None


class Replication:
    """Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway, writer: DocumentWriter) -> None:
        self.context = context
        self.limits = context.limits
        self.gateway = gateway
        self.book: CollectionRegistry = gateway.book
        self.access = gateway.access
        self.pushes = PushHandler(writer, gateway.access)
        self.wires: set[ReplicationTransport] = set()
        self._feeds: dict[tuple[str, str], set[ReplicationFeed]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.outbound_bytes = 0  # of all wires, at the last tick
        self.held_bytes = 0  # said by clients that have not said who they are
        self.pulls = 0
        self.resyncs = 0
        self._signer: TokenSigner | None = None
        self._making_key = False
        self._batches: dict[tuple[object, ...], FeedBatch] = {}

    # -- walks -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """One key for good: clients are away longer than keys of tokens last, and it opens nothing."""
        log = self.book.log
        secret = log.streams.meta.get(REPLICATION_KEY_FACT)
        if secret is not None:
            self._signer = _signer(secret)
        elif log.refusal is None and not self._making_key:
            self._making_key = True
            fresh = secrets.token_bytes(KEY_BYTES)

            def durable(_: Transaction, error: TailraceError | None) -> None:
                self._making_key = False
                if error is None:
                    self._signer = _signer(fresh)

            log.put_meta(REPLICATION_KEY_FACT, fresh, durable)

    @property
    def signer(self) -> TokenSigner:
        if self._signer is None:
            self.start()
        if self._signer is None:
            raise TailraceError("unavailable", "the server cannot sign checkpoints yet")
        return self._signer

    def find(self, database: str, name: str) -> Collection | None:
        """The collection, once it has come into being."""
        found = self.book.find(database, name)
        return None if found is None or not found.durable else found

    def pages(self, identity: Identity, collection: Collection, shape: DocumentShape) -> ChangePages:
        return ChangePages(self.book, self.access, identity, collection, shape)

    def walk(self, identity: Identity, collection: Collection, given: Checkpoint | None) -> PullCursor:
        """Where a checkpoint stands; raises if it cannot be gone on from."""
        fresh = self.tail(identity, collection)
        if given is None:
            return fresh.moved([0] * len(fresh.seqs), began=fresh.seqs)
        purged = [one.seq for one in self.book.view.now.purged(collection.number, len(fresh.seqs))]
        if given.walk is None:
            return self._since(collection, given.updated_ms, fresh, purged)
        walk = given.walk
        if (walk.database, walk.collection) != (fresh.database, fresh.collection):
            raise TailraceError("invalid_checkpoint", "the checkpoint is of another collection")
        known = len(walk.seqs) == len(fresh.seqs) and not any(map(int.__gt__, walk.seqs, fresh.seqs))
        if walk.generation != fresh.generation or not known:
            raise checkpoints.checkpoint_expired("the collection was made anew")
        if walk.misses(purged):
            raise checkpoints.checkpoint_expired("deletions that it has not seen are forgotten")
        return walk if walk.digest == fresh.digest else walk.again(fresh.digest)

    def tail(self, identity: Identity, collection: Collection) -> PullCursor:
        """A walk that has come to the end."""
        return PullCursor(
            collection.database,
            collection.name,
            self.book.generation(collection),
            self.access.read_meaning(identity, collection),
            list(collection.applied),
            [],
            [],
        )

    def _since(
        self, collection: Collection, updated_ms: int, fresh: PullCursor, purged: list[int]
    ) -> PullCursor:
        """A client that knows a time only gets whatever may have come later: repeats, but no losses."""
        since_ms = updated_ms - LATE_MS
        view = self.book.view.now
        seqs = [
            view.last_before(collection.number, partition, since_ms, tail)
            for partition, tail in enumerate(fresh.seqs)
        ]
        if any(map(int.__gt__, purged, seqs)):
            kept_s = collection.config.tombstone_s(self.limits)
            now_ms = self.context.clock.now_ns() // 1_000_000
            if kept_s is None or since_ms < now_ms - kept_s * 1000:
                raise checkpoints.checkpoint_expired("deletions that it has not seen are forgotten")
            # They are all older than that.
            seqs = list(map(max, seqs, purged))
        return fresh.moved(seqs)

    def shown(self, walk: PullCursor, last: tuple[int, str]) -> dict[str, Any]:
        return checkpoints.encode_checkpoint(walk, *last, self.signer)

    async def pull(
        self, identity: Identity, asked: PullRequest, head: bytes = b"", tail: bytes = b""
    ) -> PullResult:
        """The page behind a checkpoint, as JSON between `head` and `tail`."""
        self.pulls += 1
        collection = self.find(asked.database, asked.name)
        if collection is None:
            if asked.checkpoint is not None and asked.checkpoint.walk is not None:
                raise checkpoints.checkpoint_expired("the collection is gone")
            empty = orjson.dumps({"documents": [], "checkpoint": asked.given})
            return PullResult(_single_piece(head + empty + tail), None)
        if collection.state not in READABLE_STATES:
            raise TailraceError("unavailable", "the collection is being loaded, or in doubt")
        pages = self.pages(identity, collection, asked.shape)
        listed = await pages.listed(self.walk(identity, collection, asked.checkpoint), asked.limit)
        # Nothing new: what the client has stays good.
        checkpoint = self.shown(listed.walk, listed.last) if listed.keys else asked.given
        end = b',"checkpoint":%b}' % orjson.dumps(checkpoint)
        return PullResult(pages.pieces(listed, head + b'{"documents":', end + tail), listed.walk)

    async def batch(
        self, identity: Identity, collection: Collection, shape: DocumentShape, walk: PullCursor, limit: int
    ) -> FeedBatch:
        """What comes next on a feed. Many stand at one place and may read the same: made once for all."""
        key = _batch_key(collection, walk, shape, limit)
        found = self._batches.get(key)
        if found is None:
            pages = self.pages(identity, collection, shape)
            found = await pages.batch(walk, limit, self.limits.watch_snapshot_bytes)
            if not walk.began and not walk.held and key == _batch_key(collection, walk, shape, limit):
                self._batches[key] = found
                while len(self._batches) > BATCHES_CACHED_MAX:
                    del self._batches[next(iter(self._batches))]
        return found

    def push(
        self,
        identity: Identity,
        database: str,
        name: str,
        rows: list[PushRow],
        shape: DocumentShape,
        client: object,
        told: PushCallback,
    ) -> None:
        """`client`: whose feeds wait meanwhile; None if nobody can tell."""

        def noted() -> None:
            now = self.context.loop.time()
            for feed in self._feeds.get((database, name), ()) if client is not None else ():
                if feed.client == client:
                    feed.pushed_at = now

        def answer(conflicts: list[Document], refusal: TailraceError | None) -> None:
            noted()
            told(conflicts, refusal)

        noted()
        self.pushes.push(identity, database, name, rows, shape, answer)

    # -- feeds and wires -------------------------------------------------------------------------------

    def check_room(self) -> None:
        if len(self.wires) + len(self.gateway.sessions) >= self.limits.watch_connections:
            raise TailraceError("overloaded", "there are too many realtime connections")

    @property
    def is_crowded(self) -> bool:
        """So much is unsent that feeds wait: they are the first that can."""
        unsent = self.outbound_bytes + self.gateway.outbound_bytes
        return unsent >= SOFT * self.limits.watch_outbound_total_bytes

    def opened(self, wire: ReplicationTransport) -> None:
        self.wires.add(wire)
        if self._timer is None:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def closed(self, wire: ReplicationTransport) -> None:
        self.wires.discard(wire)

    def follow(self, feed: ReplicationFeed) -> asyncio.Task[None]:
        """Lets a feed run until it is cancelled or its wire ends."""
        key = (feed.database, feed.name)
        self._feeds.setdefault(key, set()).add(feed)

        def ended(_: asyncio.Task[None]) -> None:
            found = self._feeds.get(key)
            if found is not None:
                found.discard(feed)
                if not found:
                    del self._feeds[key]

        task = self.spawn(feed.run())
        task.add_done_callback(ended)
        return task

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.context.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def feeds(self) -> int:
        return sum(len(found) for found in self._feeds.values())

    def on_changed(self, collection: Collection) -> None:
        """Something of the collection is durable, or its rules are others; the view has it by the time that
        anybody whom this wakes has their turn."""
        for feed in self._feeds.get((collection.database, collection.name), ()):
            feed.woken.set()

    def _tick(self) -> None:
        self._timer = None
        self.outbound_bytes = sum(wire.unsent_bytes for wire in self.wires)
        now = self.context.loop.time()
        for wire in tuple(self.wires):
            wire.on_tick(now)
        if self.wires:
            self._timer = self.context.loop.call_later(TICK_S, self._tick)

    def recheck(self, stands: Callable[[Identity], bool]) -> int:
        """Sends away whoever has lost their right, and counts them."""
        lost = [wire for wire in self.wires if wire.known is not None and not stands(wire.known)]
        for wire in lost:
            wire.close(4401, "the token was revoked")
        return len(lost)

    def end_all(self) -> None:
        """Shutdown: what is under way is answered, then everybody comes back."""
        for wire in tuple(self.wires):
            wire.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _single_piece(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _signer(secret: bytes) -> TokenSigner:
    return TokenSigner(KeyRing((SigningKey(0, secret, 0),)), 0, lambda: 0)


def _batch_key(
    collection: Collection, walk: PullCursor, shape: DocumentShape, limit: int
) -> tuple[object, ...]:
    """Feeds of which this is the same are sent the same, as long as nothing happens."""
    about = (collection, walk.generation, walk.digest, collection.config.rule_version, shape, limit)
    return (*about, tuple(walk.began), tuple(walk.held), tuple(walk.seqs), tuple(collection.applied))
