"""The real log on a loop of its own, driven step by step and crashed at will."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import orjson
import uvloop

from support.log_model import Append as ModelAppend
from support.log_model import Lifetime as ModelLifetime
from tailrace.common.clock import FakeClock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.log.decide import AppendRequest, CreateRequest
from tailrace.log.history import FetchedBlock, NotLocalError
from tailrace.log.log import Log
from tailrace.log.model import Lifetime, Stream
from tailrace.log.reader import Page
from tailrace.log.records import Append, Recorded, Sealed
from tailrace.log.segment_catalogue import CompactionIntent
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.transaction import Transaction
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE, is_json
from tailrace.spark.jobs.compaction import compact_segments
from tailrace.storage.bootstrap import bootstrap
from tailrace.storage.bucket_ownership import BucketOwnership
from tailrace.storage.checkpointer import checkpoint_file
from tailrace.storage.data_directory import DataDirectory
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.sealer import Sealer
from tailrace.storage.sealer_client import (
    JobKind,
    ManifestPublication,
    SealerJob,
    SealerReport,
    SealerSetup,
)
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, stream_prefix

CENTURY_NS = 100 * 365 * 86_400 * 10**9
# Thousands of syncs that no power cut will ever test: in memory where there is such a place.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
SMALL_FILE_BYTES = 4 * 1024 * 1024
T = TypeVar("T")


class Pending:
    """An answer that is on its way: entries added and whether something changed, or the refusal's code."""

    def __init__(self) -> None:
        self.settled = False
        self.code: str | None = None
        self.count = 0
        self.offset = ""

    def reply(self, transaction: Transaction, error: TailraceError | None) -> None:
        assert not self.settled, "answered twice"
        self.settled = True
        if error is not None:
            self.code = error.code
            return
        stream = transaction.subject
        assert stream is not None
        self.offset = stream.offset(max(stream.visible, 0))
        if not transaction.duplicate:
            for op, changed in transaction.steps():
                if isinstance(op, Append) and changed is stream:
                    self.count += op.count
                    self.offset = stream.offset(op.first + op.count - 1)


class LogHarness:
    """Opens, drives, checkpoints, closes and crashes a log."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self._root = directory
        self._lives = 0
        if limits.journal_file_bytes == Limits().journal_file_bytes:
            # The usual 64 MiB are zeros that are written while the test runs, and copied at every crash.
            limits = msgspec.structs.replace(limits, journal_file_bytes=SMALL_FILE_BYTES)
        self._limits = limits
        self.clock = FakeClock()
        self.start_ns = self.clock.now_ns()
        self.loop = uvloop.new_event_loop()
        self.directory = directory / "life-0"
        self.retired: list[tuple[int, int]] = []
        self._bucket = (directory / "objects").as_uri()
        self._fence = 0
        self._sealer: Sealer | None = None
        self._open()

    def _open(self) -> None:
        async def opened() -> Log:
            cold = ColdReader(self._bucket, None, 0, self._limits, self.loop)
            log = Log(self.directory, self._limits, self.clock, self.loop, cold=cold)
            log.open()
            await log.committer.drain()
            return log

        self.retired = []
        self.log = self.run(opened())
        self.writer = StoredStreams(self.directory / "hot.db", writer=True)
        self.retired += self.log.recovered.files
        self.log.on_file_retired = lambda seq, end: self.retired.append((seq, end))

    def run(self, awaitable: Awaitable[T]) -> T:
        async def main() -> T:
            return await awaitable

        return self.loop.run_until_complete(main())

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Calls a plain function of the log on its loop, where timers may be set."""

        async def called() -> T:
            return function(*arguments)

        return self.run(called())

    def sweep(self) -> None:
        """What the timers do within two seconds: everything that has expired goes."""
        self.call(self.log.expiry.sweep)
        self.call(self.log.expiry.sweep_stored)
        self.settle()

    def settle(self) -> None:
        self.run(self.log.committer.drain())

    def reopen(self) -> None:
        self._end()
        self._open()

    def _end(self) -> None:
        """What a server has beside its log ends with it."""
        self.run(self.log.close())
        cold = self.log.reader.history.cold
        assert cold is not None
        self.run(cold.close())
        if self._sealer is not None:
            self.run(self._sealer.close())
            self._sealer = None

    def crash(self, *, turns: int) -> None:
        """What a power cut leaves: the files as they are after a few turns of the loop."""
        for _ in range(turns):
            self.run(asyncio.sleep(0))
        self._lives += 1
        copy = self._root / f"life-{self._lives}"
        shutil.copytree(self.directory, copy)
        self._end()
        shutil.rmtree(self.directory)
        self.directory = copy
        self._open()

    def back_up(self) -> Path:
        """A copy of the directory as it is now; the bucket is not in it."""
        self.settle()
        self._lives += 1
        copy = self._root / f"backup-{self._lives}"
        shutil.copytree(self.directory, copy)
        return copy

    def restore(self, backup: Path) -> None:
        """An older directory comes back to the bucket, under the name that it had there."""
        self._end()
        shutil.rmtree(self.directory)
        self.directory = backup
        self._open()

    def bootstrap(self) -> None:
        """The directory is lost; what the bucket has comes back, and belongs to a new owner."""
        self._end()
        shutil.rmtree(self.directory)
        self._lives += 1
        self.directory = self._root / f"life-{self._lives}"
        directory = DataDirectory(self.directory)
        settings = Settings(data_dir=self.directory, object_store=self._bucket, limits=self._limits)
        self.run(bootstrap(settings, directory, self.clock))
        directory.close()
        self._fence = 0
        self._open()

    def close(self) -> None:
        self._end()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def checkpoint(self, *, tell: bool) -> None:
        """Folds the oldest retired journal file; without `tell` the log does not hear of it."""
        if not self.retired:
            return
        self.settle()
        seq, end = self.retired[0]
        checkpoint_file(self.directory, self.writer, seq, end, CENTURY_NS)
        if tell:
            self.retired.pop(0)
            self.call(self.log.checkpointed, seq)

    # -- cold history ------------------------------------------------------------------------------------

    def seal(self, stream: Stream) -> None:
        """Moves what the hot store has of a stream to the object store, and writes that down."""
        if stream.stored <= stream.sealed:
            return
        report = self.ask_to_seal(stream)
        assert not report.error, report.error
        if report.segments:
            sealed = Sealed(stream.number, report.generation, report.as_of, report.segments, report.footers)
            self.call(self.log.record_objects, sealed)
            self.settle()

    def ask_to_seal(self, stream: Stream) -> SealerReport:
        """What the sealer says; nothing of it is written down."""
        return self._answer("seal", [stream.number], stream.sealed)

    def tidy(self) -> None:
        """Brings manifests up to date and deletes the objects of removed streams."""
        cold = self.log.store.db.cold
        stale = [number for number, _ in cold.stale_heads(0, 100)]
        deleted = [row.number for row in cold.deleted_streams(0, 100)]
        if stale:
            report = self._ask("heads", stale)
            heads = [head for head in report.done if head[1]]
            self.call(self.log.record_objects, Recorded(report.as_of, heads, []))
        if deleted:
            self._ask("bury", deleted)
            self.call(self.log.record_objects, Recorded(0, [], deleted))
        self.settle()

    def trim(self, stream: Stream) -> None:
        """Deletes the objects of what retention took away."""
        self._ask("trim", [stream.number])

    def compact(self, stream: Stream, inputs: list[SegmentInfo]) -> SegmentInfo:
        """One segment in the place of several that follow each other, and these are deleted at once."""
        identity = make_stream_id(stream.name, stream.incarnation)
        place = self._root / "objects" / stream_prefix(identity)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "joined"
            info = compact_segments([(place / one.key).read_bytes() for one in inputs], path)
            shutil.copyfile(path, place / info.key)
        publication = ManifestPublication(stream_id=identity, segment=info, replaced=inputs)
        report = self._ask("compact", [stream.number], publication=publication)
        assert not report.refused, report.detail
        done = CompactionIntent(info, tuple(inputs)).done(
            stream.number, report.generation, report.footers[0], 0
        )
        self.call(self.log.record_objects, done)
        self.settle()
        for one in inputs:
            (place / one.key).unlink()
        return info

    def _ask(
        self, kind: JobKind, numbers: list[int], publication: ManifestPublication | None = None
    ) -> SealerReport:
        report = self._answer(kind, numbers, publication=publication)
        assert not report.error, report.error
        return report

    def _answer(
        self,
        kind: JobKind,
        numbers: list[int],
        sealed: int = 0,
        publication: ManifestPublication | None = None,
    ) -> SealerReport:
        if not self._fence:
            self._fence = self.run(
                BucketOwnership(open_object_store(self._bucket)).claim("model", take_over=True)
            )
        if self._sealer is None:
            setup = SealerSetup(
                data_dir=str(self.directory),
                url=self._bucket,
                deployment="model",
                fence=self._fence,
                limits=self._limits,
            )
            self._sealer = Sealer(setup)
        job = SealerJob(id=1, kind=kind, numbers=numbers, sealed=sealed, publication=publication)
        return self.run(self._sealer.do(job))

    def put_meta(self, key: str, value: bytes) -> None:
        self.call(self.log.put_meta, key, value)
        self.settle()

    # -- requests ----------------------------------------------------------------------------------------

    def append(self, name: str, append: ModelAppend) -> Pending:
        pending = Pending()

        async def submit() -> None:
            stream = self.log.existing(name)
            unset = stream.content_type is None
            self.log.append(stream, _request(append, cut=unset or stream.json), pending.reply, None)

        return self._submitted(pending, submit())

    def create(
        self,
        name: str,
        content_type: str | None,
        lifetime: ModelLifetime,
        initial: ModelAppend,
        fork: tuple[str, tuple[int, int] | None, int] | None,
    ) -> Pending:
        pending = Pending()
        source, position, sub = fork or (None, None, 0)

        async def submit() -> None:
            found = None if source is None else self.log.find(source)
            typed = content_type
            first: AppendRequest | None = None
            if initial.payloads and self.log.find(name) is None:
                typed = (
                    content_type or (None if found is None else found.content_type) or DEFAULT_CONTENT_TYPE
                )
                initial.content_type = typed
                first = _request(initial, cut=True)
            request = CreateRequest(
                name, typed, Lifetime(*lifetime), initial.closes, source, position, sub, first
            )
            at_hand: list[FetchedBlock] = []
            while True:
                try:
                    self.log.create(request, pending.reply, None, at_hand)
                except NotLocalError as needed:
                    at_hand.append(await self.log.reader.fetch_block(needed.missing))
                else:
                    break

        return self._submitted(pending, submit())

    def delete(self, name: str) -> Pending:
        pending = Pending()

        async def submit() -> None:
            stream = self.log.find(name)
            if stream is None:
                tombstone = self.log.streams.tombstone(name)
                if tombstone is None or tombstone.reason != "deleted":
                    raise TailraceError("not_found", "never there, or expired")
                pending.settled = True
                return
            if stream.gone:
                raise TailraceError("stream_gone", "soft-deleted")
            self.log.remove(stream, "deleted", pending.reply, None)

        return self._submitted(pending, submit())

    def _submitted(self, pending: Pending, submit: Awaitable[None]) -> Pending:
        try:
            self.run(submit)
        except TailraceError as refusal:
            pending.settled = True
            pending.code = refusal.code
        return pending

    # -- reading -----------------------------------------------------------------------------------------

    def find(self, name: str) -> Stream | None:
        return self.call(self.log.find, name)

    def read(
        self,
        stream: Stream,
        after: int,
        bytes_max: int,
        entries_max: int,
        key: bytes | None,
        *,
        apart: bool = False,
    ) -> Page:
        return self.run(self.log.reader.read(stream, after, bytes_max, entries_max, key, apart=apart))

    def time_of(self, stream: Stream, entry: int) -> int:
        async def found() -> int:
            try:
                return self.log.reader.time_of(stream, entry)
            except NotLocalError as needed:
                return self.log.reader.time_of(
                    stream, entry, [await self.log.reader.fetch_block(needed.missing)]
                )

        return self.run(found())

    def registry(self) -> list[tuple[str, str, bool | None, str | None]]:
        stream = self.find("__registry__")
        assert stream is not None
        events: list[tuple[str, str, bool | None, str | None]] = []
        parts = self.read(stream, 0, 2**40, 2**40, None).parts
        for event in orjson.loads(b"[" + b",".join(parts) + b"]"):
            operation, value = event["headers"]["operation"], event.get("value", {})
            kind = event["headers"].get("reason", value.get("contentType"))
            events.append((operation, event["key"], value.get("closed"), kind))
        return events


def _request(append: ModelAppend, *, cut: bool) -> AppendRequest:
    """A request as the protocol layer would hand it over."""
    batch = len(append.payloads) > 1 and is_json(append.content_type) and cut
    body = b",".join(append.payloads)
    return AppendRequest(
        body,
        append.content_type if append.payloads else None,
        [len(payload) for payload in append.payloads] if batch else None,
        append.closes,
        append.key,
        append.hint_ns,
        append.seq,
        append.producer,
    )
