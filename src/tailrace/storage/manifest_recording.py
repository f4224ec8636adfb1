"""Bringing manifests up to date: streams whose manifest is stale, and streams that were deleted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tailrace.common.backoff import Backoff
from tailrace.common.errors import TailraceError
from tailrace.log.model import Lifetime, Stream
from tailrace.log.records import Recorded
from tailrace.log.stored_streams import StoredStreams, decode_stream, encode_stream
from tailrace.storage.hot_store.tables import ColdTables, DeletedStreamRow
from tailrace.storage.manifests.model import ForkParent, RecordedLifetime, StreamFacts
from tailrace.storage.segments.model import make_stream_id

if TYPE_CHECKING:
    from tailrace.storage.sealing import SealingService


class DeletedStreamFacts(msgspec.Struct, array_like=True):
    """The row of a deleted stream in the table `graves`."""

    stream: bytes  # its last image
    at_ns: int
    reason: str


def encode_deleted(stream: Stream, at_ns: int, reason: str) -> bytes:
    return msgspec.msgpack.encode(DeletedStreamFacts(encode_stream(stream), at_ns, reason))


def decode_deleted(raw: bytes) -> tuple[Stream, int, str]:
    found = msgspec.msgpack.decode(raw, type=DeletedStreamFacts)
    return decode_stream(found.stream), found.at_ns, found.reason


def manifest_facts(stream: Stream, as_of: int, store: StoredStreams | None = None) -> StreamFacts:
    """The manifest fields of a stream that was read from the hot store after journal file `as_of`."""
    parent: ForkParent | None = None
    if stream.parent and store is not None:
        source = store.stream_by_number(stream.parent)
        assert source is not None, f"the source of fork {stream.name} is missing"
        parent = ForkParent(make_stream_id(source.name, source.incarnation), source.name)
    return StreamFacts(
        name=stream.name,
        stream_id=make_stream_id(stream.name, stream.incarnation),
        incarnation=stream.incarnation,
        epochs=stream.epochs,
        created_ns=stream.created_ns,
        tail=stream.tail,
        as_of=as_of,
        content_type=stream.content_type,
        lifetime=_recorded_lifetime(stream.lifetime),
        asked=_recorded_lifetime(stream.requested_lifetime),
        touched_ns=stream.touched_saved_ns,
        parent=parent,
        fork_entry=stream.fork_entry,
        fork_sub=stream.fork_sub,
        forks=stream.forks,
        gone=stream.gone,
        gone_reason=stream.gone_reason,
        meta_keys=tuple(sorted(stream.documents or ())),
        closed=stream.closed,
        closed_by=stream.closed_by,
        seq=stream.seq,
        tail_ns=stream.last_ns,
        size_bytes=stream.size_bytes,
    )


def stored_manifest_facts(store: StoredStreams, number: int) -> StreamFacts | None:
    """The manifest fields of a stream in the hot store; None if it is not there."""
    with store.snapshot():
        stream = store.stream_by_number(number)
        return None if stream is None else manifest_facts(stream, store.db.journal_seq, store)


def _recorded_lifetime(lifetime: Lifetime) -> RecordedLifetime:
    return RecordedLifetime(
        lifetime.ttl_s, lifetime.expires_ns, lifetime.retention_s, lifetime.retention_bytes
    )


HEADS_PAGE_COUNT = 64
RECORD_PAUSE_S_MIN = 2.0
RECORD_PAUSE_S_MAX = 300.0
# Recorded in the journal and not checkpointed; more have to wait for a checkpoint.
REMEMBERED_MAX = 65_536


class ManifestRecorder:
    """Runs one round at a time over what the hot store lists. Each checkpoint requests the next round."""

    def __init__(self, sealing: SealingService) -> None:
        self._sealing = sealing
        self._requested = True
        self._running = False
        self.rounds = 0  # finished, successful or not
        self._backoff = Backoff(RECORD_PAUSE_S_MIN, RECORD_PAUSE_S_MAX)
        self._recorded: dict[int, int] = {}  # stream to the journal file its manifest covers
        self._deleted: set[int] = set()
        self._by_file: dict[int, list[int]] = {}  # journal file to the streams it records as done

    @property
    def uncheckpointed(self) -> bool:
        """Whether the hot store still lists deleted streams that are done, or many recorded manifests."""
        return bool(self._deleted) or len(self._recorded) >= REMEMBERED_MAX // 2

    def request_round(self) -> int:
        """Requests a round that starts after now; returns the value of `rounds` when it has finished."""
        self._requested = True
        return self.rounds + self._running + 1

    def checkpointed(self, seq: int) -> None:
        for file in [file for file in self._by_file if file <= seq]:
            for number in self._by_file.pop(file):
                self._recorded.pop(number, None)
                self._deleted.discard(number)
        self._requested = True

    def dispatch(self) -> None:
        if self._requested and not self._running:
            self._requested = False
            self._running = True
            self._sealing.tasks.start(self._round())

    async def _round(self) -> None:
        try:
            stale = await self._record_stale()
            done = await self._delete_streams() and stale
            done = await self._sealing.meta.record() and done
        except TailraceError:
            done = False
        finally:
            self._running = False
            self.rounds += 1
        if done:
            self._backoff.reset()
        else:
            self._sealing.call_later(self._backoff.next_s(), self._request)

    def _request(self) -> None:
        self._requested = True

    async def _record_stale(self) -> bool:
        """True if all succeeded. A failure of one stream does not stop the others."""
        clean = True
        cold = self._sealing.stored
        after = 0
        while len(self._recorded) < REMEMBERED_MAX:
            rows = await self._sealing.on_thread(partial(_stale_heads, cold, after))
            forks = await self._sealing.forks_among([number for number, _ in rows])
            stale = [
                number
                for number, changed_file in rows
                if self._recorded.get(number, 0) < changed_file
                and number not in self._sealing.dispatcher.busy
                and not (number in forks and self._must_wait(number))
            ]
            if stale:
                report = await self._sealing.run_job("heads", stale)
                heads = [(number, generation) for number, generation in report.done if generation]
                if heads:
                    await self._sealing.journal(Recorded(report.as_of, heads, []))
                    for number, _ in heads:
                        self._recorded[number] = report.as_of
                        self._mark_done(number)
                clean = clean and not report.error
                if report.trouble in ("unavailable", "fenced", "ended"):
                    return False
            if len(rows) < HEADS_PAGE_COUNT:
                break
            after = rows[-1][0]
        return clean

    def _must_wait(self, number: int) -> bool:
        """Whether a fork waits for its source to be sealed; that checkpoint requests the next round."""
        stream = self._sealing.stream(number)
        return stream is not None and self._sealing.fork_dependencies.must_wait(stream)

    async def _delete_streams(self) -> bool:
        clean = True
        cold = self._sealing.stored
        after = 0
        while len(self._deleted) < REMEMBERED_MAX:
            rows = await self._sealing.on_thread(partial(_deleted_streams, cold, after))
            to_delete = [
                row.number
                for row in rows
                if row.number not in self._deleted and row.number not in self._sealing.dispatcher.busy
            ]
            if to_delete:
                report = await self._sealing.run_job("bury", to_delete)
                deleted = [number for number, _ in report.done]
                if deleted:
                    await self._sealing.journal(Recorded(0, [], deleted))
                    for number in deleted:
                        self._deleted.add(number)
                        self._mark_done(number)
                clean = clean and not report.error
                if report.trouble in ("unavailable", "fenced", "ended"):
                    return False
            if len(rows) < HEADS_PAGE_COUNT:
                break
            after = rows[-1].number
        return clean

    def _mark_done(self, number: int) -> None:
        self._by_file.setdefault(self._sealing.journal_file, []).append(number)


def _stale_heads(cold: Callable[[], ColdTables], after: int) -> list[tuple[int, int]]:
    return cold().stale_heads(after, HEADS_PAGE_COUNT)


def _deleted_streams(cold: Callable[[], ColdTables], after: int) -> list[DeletedStreamRow]:
    return cold().deleted_streams(after, HEADS_PAGE_COUNT)
