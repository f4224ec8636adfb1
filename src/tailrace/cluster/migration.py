"""Change of the number of workers: streams are copied into the directories of a new generation.

Another number of workers: the streams of the old ones, shared out anew into directories beside them.

Nothing that counts is changed but by the checkpointer: the old workers' journals are folded into their hot
stores, as any start might do, and the new hot stores are copies of their rows. When all are durable,
`workers.json` says that they count; before that moment they are a folder that the next start removes. Sealed
history stays where it is: all workers share one object store, and folders there are named after streams.

Before workers start: the data directory is made to fit their number.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple, cast

import apsw
import msgspec

from tailrace.cluster.fork_locations import FORK_NOTE_PREFIX
from tailrace.cluster.layout import (
    WORKERS_MAX,
    Layout,
    create_worker_directories,
    is_unused_directory,
    read_layout,
    refuse_leftover_generation,
    remove_other_generations,
    write_layout,
)
from tailrace.cluster.peers import FIRST_WORKER, Placement, system_stream_suffix
from tailrace.cluster.system_streams import DELIVERED_FACT as DELIVERED
from tailrace.cluster.system_streams import FORWARDED_STREAMS, SYSTEM_STREAMS
from tailrace.common import failpoints
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.log import segment_catalogue
from tailrace.log.listing import REGISTRY_SNAPSHOT_DUE
from tailrace.log.recovery import replay_journal, sync_tail
from tailrace.log.stored_streams import StoredStreams, StreamImage, decode_stream
from tailrace.storage.checkpointer import checkpoint_file, write_fork_rows
from tailrace.storage.data_directory import DataDirectory, make_directory, sync_directory
from tailrace.storage.hot_store.database import Execute, HotDatabase
from tailrace.storage.hot_store.tables import MetaTables
from tailrace.watch.service import VIEW_FILE as VIEW

logger = logging.getLogger("tailrace.workers")

# Tables whose rows belong to a stream, which they name by its number in their first column.
_STREAM_TABLES: Final = (
    *("producers", "blocks", "segments", "heads", "due", "trims", "documents", "companions", "quarantined"),
)
_IMAGE: Final = msgspec.msgpack.Decoder(StreamImage)


class StreamTarget(NamedTuple):
    """Where a stream goes, and its number there."""

    worker: int
    number: int


def migrate_streams(root: Path, present: Layout, wanted: Layout, tombstone_ms: int) -> int:
    """Fills the new workers' directories; how many streams there are. Until `workers.json` says so they do
    not count."""
    with ExitStack() as locks:
        sources: list[HotDatabase] = []
        for index in range(present.workers):
            path = present.path(root, index)
            if present.generation:
                # A worker whose supervisor was killed may still be at its end.
                locks.callback(DataDirectory(path).close)
            sources.append(fold_journal(path, tombstone_ms))
        failpoints.reached("workers.after_fold")
        _refuse_undelivered(sources)
        targets = [
            HotDatabase(wanted.path(root, index) / "hot.db", writer=True) for index in range(wanted.workers)
        ]
        count = Migration(sources, targets).run()
        _copy_view(present.path(root, FIRST_WORKER), wanted.path(root, FIRST_WORKER))
        for index, db in enumerate(targets):
            db.connection.wal_checkpoint(mode=3)
            db.close()
            sync_directory(wanted.path(root, index))
        for db in sources:
            db.close()
    failpoints.reached("workers.before_switch")
    return count


def fold_journal(path: Path, tombstone_ms: int) -> HotDatabase:
    """Brings all that a worker acknowledged into its hot store."""
    make_directory(path / "journal")
    store = StoredStreams(path / "hot.db", writer=True)
    replayed = replay_journal(path / "journal", store)
    sync_tail(path / "journal", replayed)
    for seq, end in replayed.files:
        checkpoint_file(path, store, seq, end, tombstone_ms * 1_000_000)
    db = store.db
    with db.write():  # tables that an older version did not have
        db.cold.create()
        db.documents.create()
        db.companions.create()
        if db.trims.create():
            write_fork_rows(db)
    return db


def _copy_view(source: Path, target: Path) -> None:
    """The documents of collections: derived, but their changes may not be kept as long as they are."""
    if not (source / VIEW).exists():
        return
    connection = apsw.Connection(str(source / VIEW))
    cast("Execute", connection.execute)("VACUUM INTO ?", (str(target / VIEW),))  # pyright: ignore[reportUnknownMemberType]
    connection.close()
    with (target / VIEW).open("rb") as copy:
        os.fsync(copy.fileno())


def _refuse_undelivered(sources: list[HotDatabase]) -> None:
    """What a worker had to tell and has not is in a stream of its own, from where only it can deliver it."""
    delivered = sources[FIRST_WORKER].meta()
    for index in range(1, len(sources)):
        for name in FORWARDED_STREAMS:
            image = sources[index].image_by_name(name + system_stream_suffix(index))
            last = int(delivered.get(f"{DELIVERED}{index}/{name}", b"0"))
            if image is not None and decode_stream(image).tail > last:
                raise TailraceError(
                    "unavailable",
                    f"worker {index} has news for {name} that did not arrive before it ended; start with "
                    f"--workers {len(sources)}, stop it with SIGTERM, then change the number",
                )


class Migration:
    """Copies rows. Streams keep their numbers where they can."""

    def __init__(self, sources: list[HotDatabase], targets: list[HotDatabase]) -> None:
        self._sources = sources
        self._targets = targets
        self._present = Placement(len(sources))
        self._placement = Placement(len(targets))
        self._places: list[dict[int, StreamTarget]] = [{} for _ in sources]
        self._taken: list[set[int]] = [set() for _ in targets]
        self._next = 1 + max(int(str(db.fact("next_number", 1))) for db in sources)

    def run(self) -> int:
        with ExitStack() as transactions:
            for db in self._targets:
                transactions.enter_context(db.write())
            for index, source in enumerate(self._sources):
                self._streams(index, source)
            for index, source in enumerate(self._sources):
                self._rows(index, source)
                self._names(index, source)
                self._facts(index, source)
            self._tellings()
            for db in self._targets:
                self._own_facts(db)
        return sum(map(len, self._places))

    # -- streams -----------------------------------------------------------------------------------------

    def _streams(self, index: int, source: HotDatabase) -> None:
        """Forks go where the stream at their root goes, since they share its entries."""
        places = self._places[index]
        roots: dict[int, str] = {}
        for number, name, parent in self._images(source):
            roots[number] = name if not parent else self._root(source, parent, roots)
        for number, name, _ in self._images(source):
            self._refuse_double(index, name)
            worker = self._placement.home(roots[number])
            places[number] = StreamTarget(worker, self._number(worker, number))
            first = self._placement.home(name)
            if first != worker:
                self._targets[first].put_meta(FORK_NOTE_PREFIX + name, b"%d" % worker)

    def _refuse_double(self, index: int, name: str) -> None:
        """A fork may have got a name that its home gave to another stream: one of them would be lost."""
        home = self._present.home(name)
        if home != index and self._sources[home].image_by_name(name) is not None:
            raise TailraceError(
                "unavailable",
                f"workers {home} and {index} both have a stream {name!r}; start with --workers "
                f"{len(self._sources)} and delete the one that is seen",
            )

    def _root(self, source: HotDatabase, number: int, roots: dict[int, str]) -> str:
        while number not in roots:
            raw = source.image_by_number(number)
            assert raw is not None, "the source of a fork is kept as long as the fork"
            image = _IMAGE.decode(raw)
            if not image.parent:
                return image.name
            number = image.parent
        return roots[number]

    @staticmethod
    def _images(source: HotDatabase) -> Iterator[tuple[int, str, int]]:
        for number, raw in cast(
            "Iterator[tuple[int, bytes]]", source.rows("SELECT number, image FROM streams ORDER BY number")
        ):
            image = _IMAGE.decode(raw)
            yield number, image.name, image.parent

    def _number(self, worker: int, number: int) -> int:
        """The old number, unless a stream of another old worker has it here."""
        taken = self._taken[worker]
        if number in taken:
            number = self._next
            self._next += 1
        taken.add(number)
        return number

    # -- rows --------------------------------------------------------------------------------------------

    def _rows(self, index: int, source: HotDatabase) -> None:
        places = self._places[index]
        rows = source.rows("SELECT number, name, gone, deadline_ns, image FROM streams")
        for number, name, gone, deadline_ns, raw in cast(
            "Iterator[tuple[int, str, int, int | None, bytes]]", rows
        ):
            place = places[number]
            image = _IMAGE.decode(raw)
            image.number = place.number
            image.parent = places[image.parent].number if image.parent else 0
            encoded = msgspec.msgpack.encode(image)
            self._targets[place.worker].put_stream(place.number, name, bool(gone), deadline_ns, encoded)
        for table in _STREAM_TABLES:
            self._copy(source, table, places)
        forks = source.rows("SELECT number, parent, fork_entry, earliest, gone, forks FROM forks")
        for number, parent, *rest in cast("Iterator[tuple[int, ...]]", forks):
            place = places[number]
            values = (place.number, places[parent].number, *rest)
            self._targets[place.worker].execute("INSERT INTO forks VALUES(?, ?, ?, ?, ?, ?)", values)

    def _copy(self, source: HotDatabase, table: str, places: dict[int, StreamTarget]) -> None:
        insert = ""
        for number, *rest in source.rows(f"SELECT * FROM {table}"):  # noqa: S608 - names of ours
            place = places.get(cast("int", number))
            if place is None:
                continue  # of a stream that is gone
            insert = insert or f"INSERT INTO {table} VALUES(?{', ?' * len(rest)})"
            self._targets[place.worker].execute(insert, (place.number, *rest))

    def _names(self, index: int, source: HotDatabase) -> None:
        """What is left of deleted streams, by their names."""
        for name, *rest in source.rows("SELECT name, deleted_ns, image FROM tombstones"):
            target = self._targets[self._placement.home(cast("str", name))]
            target.execute("INSERT OR REPLACE INTO tombstones VALUES(?, ?, ?)", (name, *rest))
        for number, name, *rest in source.rows("SELECT number, name, stream_id, image FROM graves"):
            worker = self._placement.home(cast("str", name))
            values = (self._number(worker, cast("int", number)), name, *rest)
            self._targets[worker].execute("INSERT INTO graves VALUES(?, ?, ?, ?)", values)

    # -- facts -------------------------------------------------------------------------------------------

    def _facts(self, index: int, source: HotDatabase) -> None:
        """Facts about a stream go with it; those of the server itself are the first worker's."""
        first = self._targets[FIRST_WORKER]
        for key, value in source.meta().items():
            if key.startswith(segment_catalogue.COMPACTION_FACT_PREFIX):
                place = self._places[index].get(int(key[len(segment_catalogue.COMPACTION_FACT_PREFIX) :]))
                if place is not None:
                    self._targets[place.worker].put_meta(
                        segment_catalogue.compaction_fact_key(place.number), value
                    )
            elif index == FIRST_WORKER and not key.startswith(FORK_NOTE_PREFIX):
                first.put_meta(key, value)
        if index == FIRST_WORKER and MetaTables(source).exist():
            MetaTables(first).changed([], 0)
            for row in source.rows("SELECT subject, file FROM meta_changes"):
                first.execute("INSERT OR REPLACE INTO meta_changes VALUES(?, ?)", row)

    def _tellings(self) -> None:
        """What workers have told counts as delivered, where nothing says how far that came: a bucket does not
        know. Whose streams are to be told of again is not said by a fact of one worker, so all do it."""
        first = self._targets[FIRST_WORKER]
        known = first.meta()
        for source in self._sources:
            for index, name in product(range(1, WORKERS_MAX), SYSTEM_STREAMS):
                fact, image = (
                    f"{DELIVERED}{index}/{name}",
                    source.image_by_name(name + system_stream_suffix(index)),
                )
                if image is not None and fact not in known:
                    first.put_meta(fact, b"%d" % decode_stream(image).tail)
        if any(REGISTRY_SNAPSHOT_DUE in source.meta() for source in self._sources):
            for db in self._targets:
                db.put_meta(REGISTRY_SNAPSHOT_DUE, b"")

    def _own_facts(self, db: HotDatabase) -> None:
        sources = self._sources
        db.set_fact("next_number", self._next)
        # What was made from a later journal file counts as newer, on the object store too.
        for key in ("journal_seq", "first_epoch", "bootstrapped_ns"):
            highest = max(int(str(source.fact(key, 0))) for source in sources)
            if highest:
                db.set_fact(key, highest)
        row = db.one("SELECT coalesce(sum(length(body)), 0) FROM blocks")
        assert row is not None
        db.set_fact("hot_bytes", cast("int", row[0]))


def prepare_layout(settings: Settings, root: DataDirectory) -> Layout:
    """The layout to start with. Killed at any moment, it leaves the old one or the new one."""
    present = read_layout(root.path)
    remove_other_generations(root.path, present)
    if present.workers == settings.workers:
        create_worker_directories(root.path, present, root.deployment)
        return present
    wanted = Layout(workers=settings.workers, generation=present.generation + 1)
    refuse_leftover_generation(root.path, wanted)
    create_worker_directories(root.path, wanted, root.deployment)
    if not all(is_unused_directory(present.path(root.path, index)) for index in range(present.workers)):
        begun_s = time.monotonic()
        count = migrate_streams(root.path, present, wanted, settings.limits.tombstone_ms)
        logger.info(
            "%d streams of %d workers were given to %d in %.1f s",
            *(count, present.workers, wanted.workers, time.monotonic() - begun_s),
        )
    root.become_shared()
    write_layout(root.path, wanted)
    failpoints.reached("workers.after_switch")
    remove_other_generations(root.path, wanted)
    return wanted
