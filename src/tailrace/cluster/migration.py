"""Change of the number of workers: streams are copied into the directories of a new generation.

The journals of the old workers are checkpointed into their hot stores, as at any start, and their rows are
copied to new hot stores beside them. When all are durable, `workers.json` switches to the new generation in
one step; before that the new directories are removed by the next start. Sealed history does not move: all
workers share one object store, whose folders are named after streams.
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

from tailrace.cluster.fork_locations import LOCATION_PREFIX
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
from tailrace.common.logging_setup import log_fields
from tailrace.common.private_files import sync_directory
from tailrace.common.settings import Settings
from tailrace.log import segment_catalogue
from tailrace.log.listing import REGISTRY_SNAPSHOT_DUE
from tailrace.log.recovery import replay_journal, sync_tail
from tailrace.log.stored_streams import StoredStreams, StreamImage, decode_stream
from tailrace.storage.checkpointer import checkpoint_file, write_fork_rows
from tailrace.storage.data_directory import DataDirectory, make_directory
from tailrace.storage.hot_store.database import Execute, HotDatabase
from tailrace.storage.hot_store.tables import MetaTables
from tailrace.watch.service import VIEW_FILE as VIEW

logger = logging.getLogger("tailrace.workers")

# Tables whose first column is the number of a stream.
_STREAM_TABLES: Final = (
    *("producers", "blocks", "segments", "heads", "due", "trims", "documents", "companions", "quarantined"),
)
_IMAGE: Final = msgspec.msgpack.Decoder(StreamImage)


class StreamTarget(NamedTuple):
    """The new worker of a stream, and its number there."""

    worker: int
    number: int


def migrate_streams(root: Path, current: Layout, target: Layout, tombstone_ms: int) -> int:
    """Fill the directories of the new workers, but leave `workers.json`; returns the number of streams."""
    with ExitStack() as locks:
        sources: list[HotDatabase] = []
        for index in range(current.workers):
            path = current.path(root, index)
            if current.generation:
                # A worker of a killed supervisor may still be stopping.
                locks.callback(DataDirectory(path).close)
            sources.append(fold_journal(path, tombstone_ms))
        failpoints.reached("workers.after_fold")
        _refuse_undelivered(sources)
        targets = [
            HotDatabase(target.path(root, index) / "hot.db", writer=True) for index in range(target.workers)
        ]
        count = Migration(sources, targets).run()
        _copy_view(current.path(root, FIRST_WORKER), target.path(root, FIRST_WORKER))
        for index, db in enumerate(targets):
            db.connection.wal_checkpoint(mode=3)
            db.close()
            sync_directory(target.path(root, index))
        for db in sources:
            db.close()
    failpoints.reached("workers.before_switch")
    return count


def fold_journal(path: Path, tombstone_ms: int) -> HotDatabase:
    """Checkpoint the whole journal of a worker into its hot store."""
    make_directory(path / "journal")
    store = StoredStreams(path / "hot.db", writer=True)
    replayed = replay_journal(path / "journal", store)
    sync_tail(path / "journal", replayed)
    for seq, end in replayed.files:
        checkpoint_file(path, store, seq, end, tombstone_ms * 1_000_000)
    db = store.db
    with db.write():  # tables that older versions did not have
        db.cold.create()
        db.documents.create()
        db.index_files.create()
        if db.trims.create():
            write_fork_rows(db)
    return db


def _copy_view(source: Path, target: Path) -> None:
    """Copy the documents of collections: their changes may not be retained as long as they are."""
    if not (source / VIEW).exists():
        return
    connection = apsw.Connection(str(source / VIEW))
    cast("Execute", connection.execute)("VACUUM INTO ?", (str(target / VIEW),))  # pyright: ignore[reportUnknownMemberType]
    connection.close()
    with (target / VIEW).open("rb") as copy:
        os.fsync(copy.fileno())


def _refuse_undelivered(sources: list[HotDatabase]) -> None:
    """Refuse if a worker has events in its own system streams that it has not delivered."""
    delivered = sources[FIRST_WORKER].meta()
    for index in range(1, len(sources)):
        for name in FORWARDED_STREAMS:
            image = sources[index].image_by_name(name + system_stream_suffix(index))
            last = int(delivered.get(f"{DELIVERED}{index}/{name}", b"0"))
            if image is not None and decode_stream(image).tail > last:
                raise TailraceError(
                    "unavailable",
                    f"worker {index} has undelivered events for {name}; start with --workers {len(sources)}, "
                    "stop the server with SIGTERM, then change the number of workers",
                )


class Migration:
    """Copies all rows. Streams keep their numbers unless they are used already."""

    def __init__(self, sources: list[HotDatabase], targets: list[HotDatabase]) -> None:
        self._sources = sources
        self._targets = targets
        self._present = Placement(len(sources))
        self._placement = Placement(len(targets))
        self._stream_targets: list[dict[int, StreamTarget]] = [{} for _ in sources]
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
            self._deliveries()
            for db in self._targets:
                self._own_facts(db)
        return sum(map(len, self._stream_targets))

    # -- streams -----------------------------------------------------------------------------------------

    def _streams(self, index: int, source: HotDatabase) -> None:
        """Choose the target of each stream. Forks go with their root, whose entries they share."""
        stream_targets = self._stream_targets[index]
        roots: dict[int, str] = {}
        for number, name, parent in self._images(source):
            roots[number] = name if not parent else self._root(source, parent, roots)
        for number, name, _ in self._images(source):
            self._refuse_duplicate(index, name)
            worker = self._placement.owner(roots[number])
            stream_targets[number] = StreamTarget(worker, self._number(worker, number))
            first = self._placement.owner(name)
            if first != worker:
                self._targets[first].put_meta(LOCATION_PREFIX + name, b"%d" % worker)

    def _refuse_duplicate(self, index: int, name: str) -> None:
        """Refuse if the owner of a fork's name has another stream of this name: one would be lost."""
        owner = self._present.owner(name)
        if owner != index and self._sources[owner].image_by_name(name) is not None:
            raise TailraceError(
                "unavailable",
                f"workers {owner} and {index} both have a stream {name!r}; start with --workers "
                f"{len(self._sources)} and delete the visible one",
            )

    def _root(self, source: HotDatabase, number: int, roots: dict[int, str]) -> str:
        while number not in roots:
            raw = source.image_by_number(number)
            assert raw is not None, "the source of a fork is retained as long as the fork"
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
        """The old number, unless a stream of another old worker uses it on this worker."""
        taken = self._taken[worker]
        if number in taken:
            number = self._next
            self._next += 1
        taken.add(number)
        return number

    # -- rows --------------------------------------------------------------------------------------------

    def _rows(self, index: int, source: HotDatabase) -> None:
        stream_targets = self._stream_targets[index]
        rows = source.rows("SELECT number, name, gone, deadline_ns, image FROM streams")
        for number, name, gone, deadline_ns, raw in cast(
            "Iterator[tuple[int, str, int, int | None, bytes]]", rows
        ):
            target = stream_targets[number]
            image = _IMAGE.decode(raw)
            image.number = target.number
            image.parent = stream_targets[image.parent].number if image.parent else 0
            encoded = msgspec.msgpack.encode(image)
            self._targets[target.worker].put_stream(target.number, name, bool(gone), deadline_ns, encoded)
        for table in _STREAM_TABLES:
            self._copy(source, table, stream_targets)
        forks = source.rows("SELECT number, parent, fork_entry, earliest, gone, forks FROM forks")
        for number, parent, *rest in cast("Iterator[tuple[int, ...]]", forks):
            target = stream_targets[number]
            values = (target.number, stream_targets[parent].number, *rest)
            self._targets[target.worker].execute("INSERT INTO forks VALUES(?, ?, ?, ?, ?, ?)", values)

    def _copy(self, source: HotDatabase, table: str, stream_targets: dict[int, StreamTarget]) -> None:
        insert = ""
        for number, *rest in source.rows(f"SELECT * FROM {table}"):  # noqa: S608 - names of ours
            target = stream_targets.get(cast("int", number))
            if target is None:
                continue  # of a deleted stream
            insert = insert or f"INSERT INTO {table} VALUES(?{', ?' * len(rest)})"
            self._targets[target.worker].execute(insert, (target.number, *rest))

    def _names(self, index: int, source: HotDatabase) -> None:
        """Copy tombstones and graves of deleted streams, by name."""
        for name, *rest in source.rows("SELECT name, deleted_ns, image FROM tombstones"):
            target = self._targets[self._placement.owner(cast("str", name))]
            target.execute("INSERT OR REPLACE INTO tombstones VALUES(?, ?, ?)", (name, *rest))
        for number, name, *rest in source.rows("SELECT number, name, stream_id, image FROM graves"):
            worker = self._placement.owner(cast("str", name))
            values = (self._number(worker, cast("int", number)), name, *rest)
            self._targets[worker].execute("INSERT INTO graves VALUES(?, ?, ?, ?)", values)

    # -- facts -------------------------------------------------------------------------------------------

    def _facts(self, index: int, source: HotDatabase) -> None:
        """Facts about a stream go with it; those of the server go to the first worker."""
        first = self._targets[FIRST_WORKER]
        for key, value in source.meta().items():
            if key.startswith(segment_catalogue.COMPACTION_FACT_PREFIX):
                target = self._stream_targets[index].get(
                    int(key[len(segment_catalogue.COMPACTION_FACT_PREFIX) :])
                )
                if target is not None:
                    self._targets[target.worker].put_meta(
                        segment_catalogue.compaction_fact_key(target.number), value
                    )
            elif index == FIRST_WORKER and not key.startswith(LOCATION_PREFIX):
                first.put_meta(key, value)
        if index == FIRST_WORKER and MetaTables(source).exist():
            MetaTables(first).changed([], 0)
            for row in source.rows("SELECT subject, file FROM meta_changes"):
                first.execute("INSERT OR REPLACE INTO meta_changes VALUES(?, ?)", row)

    def _deliveries(self) -> None:
        """Mark events of workers as delivered where it is unknown, as after a restore from a bucket.

        A fact of one worker does not say whose streams need a new registry snapshot, so all workers write
        one.
        """
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
        # The highest of all, since state with a higher journal number counts as newer, also in the object
        # store.
        for key in ("journal_seq", "first_epoch", "bootstrapped_ns"):
            highest = max(int(str(source.fact(key, 0))) for source in sources)
            if highest:
                db.set_fact(key, highest)
        row = db.one("SELECT coalesce(sum(length(body)), 0) FROM blocks")
        assert row is not None
        db.set_fact("hot_bytes", cast("int", row[0]))


def prepare_layout(settings: Settings, root: DataDirectory) -> Layout:
    """Migrate to the configured number of workers, if it changed; a crash leaves the old or the new one."""
    current = read_layout(root.path)
    remove_other_generations(root.path, current)
    if current.workers == settings.workers:
        create_worker_directories(root.path, current, root.deployment)
        return current
    target = Layout(workers=settings.workers, generation=current.generation + 1)
    refuse_leftover_generation(root.path, target)
    create_worker_directories(root.path, target, root.deployment)
    if not all(is_unused_directory(current.path(root.path, index)) for index in range(current.workers)):
        begun_s = time.monotonic()
        count = migrate_streams(root.path, current, target, settings.limits.tombstone_ms)
        logger.info(
            "migrated streams to another number of workers",
            extra=log_fields(
                streams=count,
                workers_before=current.workers,
                workers=target.workers,
                seconds=round(time.monotonic() - begun_s, 1),
            ),
        )
    root.become_shared()
    write_layout(root.path, target)
    failpoints.reached("workers.after_switch")
    remove_other_generations(root.path, target)
    return target
