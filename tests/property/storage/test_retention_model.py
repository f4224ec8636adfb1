"""Retention from the journal to the bucket, with forks and crashes: what is shown can be read."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.log_harness import MEMORY, LogHarness
from support.log_model import Append
from tailrace.common.limits import Limits
from tailrace.log.decide import CreateRequest
from tailrace.log.history import FetchedBlock, NotLocalError
from tailrace.log.model import Lifetime, Stream
from tailrace.log.records import Recorded, Sealed
from tailrace.log.transaction import ignore_reply
from tailrace.storage.bucket_ownership import BucketOwnership
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.object_store.listing import entry_range_of_key
from tailrace.storage.retention_service import scan_due_streams
from tailrace.storage.sealer import Sealer
from tailrace.storage.sealer_client import JobKind, SealerJob, SealerReport, SealerSetup
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.model import make_stream_id, stream_prefix

TEXT = "text/plain"
LIMITS = Limits(journal_file_bytes=4096, seal_entries=3, block_cache_bytes=1)
START = (-(2**63), 0)


class Known:
    """A stream as its readers know it: all it ever showed, by entry."""

    def __init__(self, number: int, lifetime: Lifetime, shown: dict[int, bytes]) -> None:
        self.number = number
        self.lifetime = lifetime
        self.shown = shown
        self.times_ns: dict[int, int] = {}
        self.earliest = 0
        self.gone = False


class TrimMachine(RuleBasedStateMachine):
    """The real log, checkpointer, sealer and cold reads, one step at a time."""

    @initialize(bytes_max=st.integers(0, 8), before=st.integers(1, 9), at=st.integers(0, 9))
    def begin(self, bytes_max: int, before: int, at: int) -> None:
        self.root = Path(tempfile.mkdtemp(dir=MEMORY))
        self.url = (self.root / "objects").as_uri()
        self.log = LogHarness(self.root / "lives", LIMITS)
        self.streams: dict[str, Known] = {}
        self.names = 0
        objects = open_object_store(self.url, limits=LIMITS)
        self.fence = self.log.run(BucketOwnership(objects).claim("d", take_over=False))
        self.log.run(objects.close())
        self.wake_up()
        # A source that trims, and a fork that shows more than it: what follows is about these most of all.
        self.put(None, None, Lifetime(retention_bytes=bytes_max))
        self.append(0, before)
        self.put("s1", at, Lifetime(retention_bytes=10**6))
        self.append(0, 6)

    def wake_up(self) -> None:
        """The parts that go with each life of the server."""
        setup = SealerSetup(
            data_dir=str(self.log.directory), url=self.url, deployment="d", fence=self.fence, limits=LIMITS
        )
        self.sealer = Sealer(setup)
        self.cold = ColdReader(self.url, None, 0, LIMITS, self.log.loop)
        self.log.log.reader.history.cold = self.cold

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.drain()
            self.what_is_shown_can_be_read()
            self.log.run(self.cold.close())
            self.log.close()
            shutil.rmtree(self.root)

    # -- readers and writers -----------------------------------------------------------------------------

    def pick(self, which: int, *, gone: bool = False) -> str | None:
        names = [name for name, known in self.streams.items() if gone or not known.gone]
        return names[which % len(names)] if names else None

    def live(self, name: str) -> Stream:
        stream = self.log.find(name)
        assert stream is not None
        return stream

    @rule(bytes_max=st.none() | st.integers(0, 12), age_s=st.none() | st.integers(0, 30))
    def create(self, bytes_max: int | None, age_s: int | None) -> None:
        if len(self.streams) < 8:
            self.put(None, None, Lifetime(retention_s=age_s, retention_bytes=bytes_max))

    @rule(which=st.integers(0, 7), at=st.integers(0, 20), bytes_max=st.sampled_from([2, 10, 10**6]))
    def fork(self, which: int, at: int, bytes_max: int) -> None:
        source = self.pick(which)
        if source is not None and len(self.streams) < 8:
            self.put(source, at, Lifetime(retention_bytes=bytes_max))

    def put(self, source: str | None, at: int | None, lifetime: Lifetime) -> None:
        self.names += 1
        name = f"s{self.names}"
        position: tuple[int, int] | None = None
        shown: dict[int, bytes] = {}
        known = Known(0, lifetime, shown)
        if source is not None:
            origin = self.streams[source]
            stream = self.live(source)
            entry = min(stream.visible, origin.earliest + (at or 0))
            position = (0, entry)
            shown |= {number: text for number, text in origin.shown.items() if number <= entry}
            known.times_ns = dict(origin.times_ns)
            known.earliest = min(origin.earliest, entry)
        request = CreateRequest(name, TEXT, lifetime, source=source, fork_position=position)
        at_hand: list[FetchedBlock] = []
        while True:
            try:
                self.log.call(self.log.log.create, request, ignore_reply, None, at_hand)
                break
            except NotLocalError as needed:
                at_hand.append(self.log.run(self.log.log.reader.fetch_block(needed.missing)))
        self.log.settle()
        known.number = self.live(name).number
        self.streams[name] = known

    @rule(which=st.integers(0, 7), count=st.integers(1, 7))
    def append(self, which: int, count: int) -> None:
        name = self.pick(which)
        if name is None:
            return
        known = self.streams[name]
        for _ in range(count):
            entry = self.live(name).tail + 1
            text = b"%d" % (entry % 10)
            assert self.log.append(name, Append([text], TEXT)).code is None
            known.shown[entry] = text
            known.times_ns[entry] = self.log.clock.now_ns()
        self.log.settle()

    @rule(which=st.integers(0, 7))
    def delete(self, which: int) -> None:
        name = self.pick(which)
        if name is None:
            return
        assert self.log.delete(name).code is None
        self.log.settle()
        for other, known in list(self.streams.items()):
            stream = self.log.find(other)
            if stream is None:
                del self.streams[other]
            else:
                known.gone = stream.gone

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.log.clock.advance(float(seconds))

    # -- the server --------------------------------------------------------------------------------------

    @rule()
    def fold(self) -> None:
        self.log.call(self.log.log.rotate_journal)
        self.log.settle()
        while self.log.retired:
            self.log.checkpoint(tell=True)

    def job(self, kind: JobKind, numbers: list[int], sealed: int = 0) -> SealerReport:
        report = self.log.run(self.sealer.do(SealerJob(id=1, kind=kind, numbers=numbers, sealed=sealed)))
        assert not report.error, report.error
        return report

    def record(self, op: Sealed | Recorded) -> None:
        self.log.call(self.log.log.record_objects, op)
        self.log.settle()

    @rule(which=st.integers(0, 7), told=st.booleans())
    def seal(self, which: int, told: bool) -> None:
        """A server that is not `told` was killed before it could write the report down."""
        name = self.pick(which, gone=True)
        if name is None:
            return
        self.fold()
        stream = self.live(name)
        if stream.stored > stream.sealed:
            report = self.job("seal", [stream.number], stream.sealed)
            if told:
                self.record(
                    Sealed(stream.number, report.generation, report.as_of, report.segments, report.footers)
                )

    @rule()
    def look(self) -> None:
        """What is over a bound goes, and nothing else."""
        now_ns = self.log.clock.now_ns()
        found = scan_due_streams(self.log.log.store, START, [], now_ns)
        for number, earliest_was, trim in found.candidates:
            stream = self.log.log.streams.get(number)
            if stream is None or stream.removed or stream.earliest != earliest_was:
                continue
            known = self.streams[stream.name]
            for entry in range(earliest_was + 1, trim.earliest + 1):
                assert self.is_over(known, entry, now_ns)
            self.log.call(self.log.log.record_objects, trim)
            known.earliest = trim.earliest
        self.log.settle()

    def is_over(self, known: Known, entry: int, now_ns: int) -> bool:
        age_s, bytes_max = known.lifetime.retention_s, known.lifetime.retention_bytes
        old = age_s is not None and known.times_ns[entry] + age_s * 10**9 <= now_ns
        newer_bytes = sum(len(text) for other, text in known.shown.items() if other > entry)
        return old or (bytes_max is not None and newer_bytes >= bytes_max)

    @rule(told=st.booleans())
    def collect(self, told: bool) -> None:
        """Objects of removed streams, and of what retention took away."""
        db = self.log.log.store.db
        trims = [number for number, _ in db.trims.pending(0, 100)]
        graves = [grave.number for grave in db.cold.deleted_streams(0, 100)]
        if trims:
            report = self.job("trim", trims)
            if told:
                self.record(Recorded(report.as_of, [], [], trims))
        if graves:
            self.job("bury", graves)
            if told:
                self.record(Recorded(0, [], graves))

    @rule(turns=st.integers(0, 3))
    def crash(self, turns: int) -> None:
        self.log.run(self.cold.close())
        self.log.crash(turns=turns)
        self.wake_up()

    @rule()
    def drain(self) -> None:
        """Everything that is to be done, until there is nothing left; then only what is needed is stored."""
        for name in list(self.streams):
            stream = self.live(name)
            while stream.visible > (stream := self.live(name)).sealed:
                self.seal([*self.streams].index(name), True)
        quiet = False
        while not quiet:
            before = [known.earliest for known in self.streams.values()]
            self.fold()
            self.look()
            self.fold()
            self.collect(True)
            self.fold()
            rows = self.log.log.store.db.trims.pending(0, 1) or self.log.log.store.db.cold.deleted_streams(
                0, 1
            )
            quiet = not rows and before == [known.earliest for known in self.streams.values()]
        self.check_bucket()

    # -- what holds --------------------------------------------------------------------------------------

    @invariant()
    def what_is_shown_can_be_read(self) -> None:
        if not hasattr(self, "root"):
            return
        for name, known in self.streams.items():
            stream = self.live(name)
            assert (stream.earliest, stream.gone) == (known.earliest, known.gone)
            expected = b"".join(text for entry, text in sorted(known.shown.items()) if entry > known.earliest)
            page = self.log.read(stream, known.earliest, 2**40, 2**40, None)
            if not known.gone:
                assert b"".join(page.parts) == expected

    def needed(self) -> dict[int, set[int]]:
        """Entries by the stream that stores them, as far as somebody shows them."""
        needed: dict[int, set[int]] = {}
        for name, known in self.streams.items():
            for entry in range(known.earliest + 1, self.live(name).visible + 1):
                owner = self.live(name)
                while owner.parent and entry <= owner.fork_entry:
                    owner = self.log.call(self.log.log.streams.parent_of, owner)
                # A soft-deleted stream keeps what it would show, but nothing of its ancestors.
                if not known.gone or owner.name == name:
                    needed.setdefault(owner.number, set()).add(entry)
        return needed

    def check_bucket(self) -> None:
        needed = self.needed()
        folders = {
            stream_prefix(make_stream_id(name, 0)): needed.get(known.number, set())
            for name, known in self.streams.items()
        }
        for path in (self.root / "objects" / "streams").rglob("*.parquet"):
            key = path.relative_to(self.root / "objects").as_posix()
            prefix, _, relative = key.rpartition("segments/")
            entries = entry_range_of_key(f"segments/{relative}")
            assert entries is not None
            if prefix in folders:
                kept = folders[prefix]
                assert not kept.isdisjoint(range(entries[0], entries[1] + 1)), f"{key} is not needed"
            else:
                assert prefix == stream_prefix(make_stream_id("__registry__", 0)), f"{key} is of no stream"


TestTrimModel = TrimMachine.TestCase
TestTrimModel.settings = settings(max_examples=8, stateful_step_count=20)
