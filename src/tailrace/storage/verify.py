"""Verification of a bucket (everything that manifests name) and of a data directory (journal and hot store).

Nothing is changed. Safe while a server is running: what retention or a deletion removes meanwhile is not
reported. Memory is bounded by the bytes of segments in flight, not by the size of the bucket.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import apsw
import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.tasks import first_failure
from tailrace.log.journal_check import JournalCheck, check_journal
from tailrace.log.records import UNREADABLE_ERRORS
from tailrace.log.stored_streams import decode_block, decode_stream
from tailrace.storage.hot_store.database import BlockRow, HotDatabase
from tailrace.storage.manifests.model import HEAD_KEY, ManifestCorruptError, ManifestHead
from tailrace.storage.manifests.pages import ListedSegments
from tailrace.storage.manifests.store import ManifestStore, find_heads
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.object_store.listing import for_each_stream
from tailrace.storage.segments.index_files import IndexFile, has_valid_name
from tailrace.storage.segments.model import CorruptSegmentError, SegmentInfo, segment_name, stream_prefix
from tailrace.storage.segments.model import make_stream_id as stream_id_of

if TYPE_CHECKING:
    from tailrace.storage.object_store.interface import ObjectStore


STREAMS_PER_PAGE = 1000
HOT_PROBLEMS_MAX = 100
# A checkpoint may retire files while they are read.
CHECK_ATTEMPTS_MAX = 5


class HotStoreProblem(NamedTuple):
    stream: str  # empty where it is not about one
    problem: str


class HotStoreCheck(msgspec.Struct):
    """What was checked in a hot store, and the problems found."""

    journal_seq: int | None = None  # the last journal file it has; None if unknown
    streams: int = 0
    blocks: int = 0
    entries: int = 0
    bytes: int = 0  # payload
    problems: list[HotStoreProblem] = []


def check_directory(path: Path, *, deep: bool) -> tuple[JournalCheck, HotStoreCheck]:
    """Checks the journal and the hot store; with `deep` all pages and blocks of the latter."""
    seq = journal_seq(path / "hot.db")
    journal = check_journal(path / "journal", seq)
    for _ in range(CHECK_ATTEMPTS_MAX):
        seq_before, seq = seq, journal_seq(path / "hot.db")
        if not journal.problems or seq == seq_before:
            break
        journal = check_journal(path / "journal", seq)
    return journal, check_hot_store(path / "hot.db", deep=deep)


def journal_seq(path: Path) -> int | None:
    if not path.exists():
        return 0
    try:
        db = HotDatabase(path, read_only=True)
    except TailraceError:
        return None
    try:
        return db.journal_seq
    except TailraceError:
        return None
    finally:
        db.close()


def check_hot_store(path: Path, *, deep: bool) -> HotStoreCheck:
    found = HotStoreCheck()
    if not path.exists():
        found.journal_seq = 0  # everything is in the journal
        return found
    try:
        db = HotDatabase(path, read_only=True)
    except TailraceError as error:
        found.problems.append(HotStoreProblem("", _cause(error)))
        return found
    try:
        with db.connection:  # a snapshot
            _check_streams(db, found, deep=deep)
    except TailraceError as error:
        found.problems.append(HotStoreProblem("", _cause(error)))
    except apsw.Error as error:
        found.problems.append(HotStoreProblem("", f"{type(error).__name__}: {error}"))
    finally:
        db.close()
    return found


def _cause(error: TailraceError) -> str:
    return (
        error.message if error.__cause__ is None else f"{type(error.__cause__).__name__}: {error.__cause__}"
    )


def _check_streams(db: HotDatabase, found: HotStoreCheck, *, deep: bool) -> None:
    found.journal_seq = db.journal_seq
    found.streams = db.count_streams()
    if not deep:
        return
    for row in db.rows(f"PRAGMA integrity_check({HOT_PROBLEMS_MAX})"):
        if row[0] != "ok":
            found.problems.append(HotStoreProblem("", str(row[0]).replace("\n", " ")))
    name = ""
    while images := db.images_after(name, "", STREAMS_PER_PAGE):
        name = images[-1][0]
        for stream_name, image in images:
            for problem in _stream_problems(db, found, stream_name, image):
                if len(found.problems) < HOT_PROBLEMS_MAX:
                    found.problems.append(HotStoreProblem(stream_name, problem))
    unnamed = db.one(
        "SELECT count(DISTINCT number) FROM blocks WHERE number NOT IN (SELECT number FROM streams)"
    )
    if unnamed is not None and unnamed[0]:
        found.problems.append(HotStoreProblem("", f"entries of {unnamed[0]} streams that are not listed"))


def _stream_problems(db: HotDatabase, found: HotStoreCheck, name: str, image: bytes) -> Iterator[str]:
    """What is wrong with one stream: its entries follow the sealed ones without a gap, up to its tail."""
    try:
        stream = decode_stream(image)
    except UNREADABLE_ERRORS as error:
        yield f"its image cannot be decoded: {type(error).__name__}: {error}"
        return
    if stream.name != name:
        yield f"its image is that of {stream.name!r}"
    reached = stream.sealed
    query = "SELECT first, last, ends, times, keys, body FROM blocks WHERE number=? ORDER BY first"
    for row in db.rows(query, stream.number):
        raw = BlockRow(*cast("tuple[int, int, bytes, bytes, bytes | None, bytes]", row))
        try:
            block = decode_block(raw)
        except UNREADABLE_ERRORS as error:
            yield f"the block of entries {raw.first} to {raw.last} cannot be decoded: {error}"
            continue
        found.blocks += 1
        found.entries += len(block.ends)
        found.bytes += len(block.body)
        if not block.ends or block.ends[-1] != len(block.body) or len(block.times) != len(block.ends):
            yield f"the block of entries {raw.first} to {raw.last} has another length than its entries"
        if raw.first > reached + 1:
            yield f"entries {reached + 1} to {raw.first - 1} are missing"
        reached = max(reached, raw.last)
    if reached < stream.tail:
        yield f"entries {reached + 1} to {stream.tail} are missing"


BYTES_IN_PARALLEL = 96 << 20
SEGMENTS_IN_PARALLEL = 16


class VerifyFinding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    stream: str  # its name, or its id where the head cannot be read; empty if it is not about one
    stream_id: str
    key: str  # in the stream's folder, or the path of a file of the data directory
    problem: str


class VerifyReport(msgspec.Struct):
    """What was checked so far. `bytes_known` grows as manifests are read."""

    streams: int = 0
    tombstones: int = 0
    segments: int = 0
    companions: int = 0
    entries: int = 0
    bytes: int = 0
    bytes_known: int = 0
    findings: int = 0
    journal_records: int = 0
    hot_entries: int = 0
    not_checked: list[str] = []


class Verifier:
    """Verifies the streams of one bucket. `report` is called with each finding."""

    def __init__(
        self,
        objects: ObjectStore,
        report: Callable[[VerifyFinding], None],
        *,
        bytes_at_once: int = BYTES_IN_PARALLEL,
    ) -> None:
        self._objects = objects
        self._manifests = ManifestStore(objects, 0)
        self._report = report
        self._room = _InFlightLimit(bytes_at_once, SEGMENTS_IN_PARALLEL)
        self.seen = VerifyReport()

    async def bucket(self) -> VerifyReport:
        """Every stream that has a head."""
        await for_each_stream(self._objects, self.stream)
        return self.seen

    def directory(self, path: Path) -> None:
        """The journal and the hot store of a server, or of one worker. Reads all of them."""
        journal, hot = check_directory(path, deep=True)
        self.seen.journal_records += journal.records
        self.seen.hot_entries += hot.entries
        for file, problem in journal.problems:
            self._find("", "", str(path / "journal" / file), problem)
        for stream, problem in hot.problems:
            self._find(stream, "", str(path / "hot.db"), problem)

    async def named(self, name_or_id: str) -> bool:
        """Every use of one name. False: there is none."""
        heads = await find_heads(self._objects, name_or_id)
        with first_failure():
            for head in heads:
                await self.stream(head.stream_id)
        return bool(heads)

    async def stream(self, stream_id: str) -> None:
        try:
            stored = await self._manifests.load(stream_id)
        except ManifestCorruptError as error:
            self._find(stream_id, stream_id, HEAD_KEY, str(error))
            return
        if stored is None:
            return  # left by a crash: the sweep deletes it
        head = stored.head
        self.seen.streams += 1
        self.seen.tombstones += head.deleted is not None
        self.seen.bytes_known += head.segment_bytes + head.companion_bytes
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._walk(head, tasks)
            except ManifestCorruptError as error:
                self._find(head.name, stream_id, HEAD_KEY, f"{error}; the rest was not checked")
            except ObjectMissingError as error:
                if not await self._moved_on(head):
                    key = error.key.removeprefix(stream_prefix(stream_id))
                    problem = "it is named but does not exist; the rest was not checked"
                    self._find(head.name, stream_id, key, problem)

    async def _walk(self, head: ManifestHead, tasks: asyncio.TaskGroup) -> None:
        """Checks the manifest itself, and starts to read the segments it names as memory permits."""
        self._facts(head)
        await self._manifests.producers(head)
        previous: SegmentInfo | None = None
        async for info in self._manifests.segments(head):
            self._continues(head, previous, info)
            previous = info
            await self._room.acquire(info.bytes)
            tasks.create_task(self._segment(head, info))
        self._ends(head, previous)
        async for companion in self._manifests.companions(head):
            await self._room.acquire(companion.bytes)
            tasks.create_task(self._companion(head, companion))

    # -- the manifest ------------------------------------------------------------------------------------

    def _facts(self, head: ManifestHead) -> None:
        problem = ""
        if stream_id_of(head.name, head.incarnation) != head.stream_id:
            problem = "its stream id does not match its name and incarnation"
        elif max(head.tail, head.earliest, head.fork_entry) > head.uploaded_through:
            problem = "it has entries that are not uploaded"
        if problem:
            self._find(head.name, head.stream_id, HEAD_KEY, problem)

    def _continues(self, head: ManifestHead, previous: SegmentInfo | None, info: SegmentInfo) -> None:
        problem = ""
        if info.key != segment_name(info.epoch, info.first, info.last, info.sha256):
            problem = "its name does not match what is recorded about it"
        elif info.rows != info.last - info.first + 1 or info.first_ns > info.last_ns:
            problem = "its rows or times are recorded wrongly"
        elif info.epoch > head.epoch:
            problem = f"its epoch {info.epoch} is above the stream's {head.epoch}"
        elif previous is None or previous.last <= head.earliest:
            # Of what was trimmed, forks need some parts and not others; it goes some time after they did.
            begin = max(head.earliest, head.fork_entry) + 1
            if info.first > begin:
                problem = f"entries {begin} to {info.first - 1} are missing"
            elif previous is not None and info.first <= previous.last:
                problem = f"it starts at {info.first}, but the previous segment ends at {previous.last}"
        elif info.first != previous.last + 1:
            problem = f"it starts at {info.first}, but the previous segment ends at {previous.last}"
        if not problem and previous is not None and _goes_back(previous, info):
            problem = "its epoch or times are before those of the previous segment"
        if problem:
            self._find(head.name, head.stream_id, info.key, problem)

    def _ends(self, head: ManifestHead, last: SegmentInfo | None) -> None:
        if head.deleted is not None:
            return
        reached = max(head.earliest, head.fork_entry, 0 if last is None else last.last)
        if reached != head.uploaded_through:
            problem = f"its segments end at {reached}, but uploaded_through is {head.uploaded_through}"
            self._find(head.name, head.stream_id, HEAD_KEY, problem)

    async def _moved_on(self, head: ManifestHead) -> bool:
        """Whether the head was replaced since: what it named may have been deleted rightly."""
        stored = await self._manifests.load(head.stream_id)
        return stored is None or stored.head.generation != head.generation

    # -- segments ----------------------------------------------------------------------------------------

    async def _segment(self, head: ManifestHead, info: SegmentInfo) -> None:
        try:
            raw, _etag = await self._objects.get(stream_prefix(head.stream_id) + info.key)
            problems = await asyncio.to_thread(_segment_problems, raw, info, head)
        except ObjectMissingError:
            if await self._unlisted(head, info):
                return
            problems = ["it does not exist"]
        finally:
            await self._room.release(info.bytes)
        self.seen.segments += 1
        self.seen.entries += info.rows
        self.seen.bytes += info.bytes
        for problem in problems:
            self._find(head.name, head.stream_id, info.key, problem)

    async def _companion(self, head: ManifestHead, companion: IndexFile) -> None:
        """Checks the file as it was published. Its content is not compared with the segments."""
        problem = ""
        try:
            raw, _etag = await self._objects.get(stream_prefix(head.stream_id) + companion.object)
            if len(raw) != companion.bytes:
                problem = f"it has {len(raw)} bytes instead of the recorded {companion.bytes}"
            elif (await asyncio.to_thread(hashlib.sha256, raw)).hexdigest() != companion.sha256:
                problem = "its SHA-256 is not the recorded one"
            elif not has_valid_name(companion):
                problem = "its name does not match what is recorded about it"
        except ObjectMissingError:
            if await self._moved_on(head):
                return  # replaced by another one, or trimmed
            problem = "it does not exist"
        finally:
            await self._room.release(companion.bytes)
        self.seen.companions += 1
        self.seen.bytes += companion.bytes
        if problem:
            self._find(head.name, head.stream_id, companion.object, problem)

    async def _unlisted(self, head: ManifestHead, info: SegmentInfo) -> bool:
        """Whether it is no longer listed: removed by retention, or merged into another one."""
        stored = await self._manifests.load(head.stream_id)
        if stored is None or stored.head.deleted is not None or info.last <= stored.head.earliest:
            return True
        if stored.head.generation == head.generation:
            return False
        found = await self._manifests.pages(head.stream_id).within(
            ListedSegments(stored.head.pages, stored.head.segments), info.first, info.last
        )
        return info not in found

    def _find(self, stream: str, stream_id: str, key: str, problem: str) -> None:
        self.seen.findings += 1
        self._report(VerifyFinding(stream, stream_id, key, problem))


def _goes_back(previous: SegmentInfo, info: SegmentInfo) -> bool:
    return info.epoch < previous.epoch or info.first_ns < previous.last_ns


class _InFlightLimit:
    """How much may be in flight. One segment that is larger than the room has it for itself."""

    def __init__(self, bytes_max: int, count_max: int) -> None:
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._bytes = self._count = 0
        self._freed = asyncio.Condition()

    async def acquire(self, size: int) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: self._fits(size))
            self._bytes += size
            self._count += 1

    def _fits(self, size: int) -> bool:
        return self._count == 0 or (self._count < self._count_max and self._bytes + size <= self._bytes_max)

    async def release(self, size: int) -> None:
        async with self._freed:
            self._bytes -= size
            self._count -= 1
            self._freed.notify_all()


def _segment_problems(raw: bytes, info: SegmentInfo, head: ManifestHead) -> list[str]:
    """Runs on a thread: hashing and unpacking take a while."""
    from tailrace.storage.segments.reader import check_segment, file_footer

    problems = check_segment(raw, info)
    try:
        facts = file_footer(raw).facts
    except CorruptSegmentError:
        return problems  # already reported
    for name, expected in (("name", head.name), ("stream_id", head.stream_id)):
        if facts.get(name) != expected:
            problems.append(f"its {name} is {facts.get(name)!r}, but its folder is of {expected!r}")
    return problems
