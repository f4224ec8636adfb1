"""The book of collections: which there are, and how far their changes have been looked at.

A collection's changes are entries of its partition streams. As soon as some are durable they are read here,
in the order of the log, shown to whoever watches, and applied to the view: when anybody else's turn comes on
the loop, the view says what the log says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import orjson

from tailrace.errors import TailraceError
from tailrace.log.listing import list_streams
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.protocol.durations import format_instant
from tailrace.watch import names
from tailrace.watch.change import Change, decode
from tailrace.watch.view import Row, View, WriteRow

logger = logging.getLogger("tailrace.watch")

PAGE_BYTES = 4 * 1024 * 1024
PAGE_ENTRIES = 2000


class Config:
    """What is set about a collection."""

    __slots__ = ("generation", "partitions", "read_rule", "rule_version", "write_rule")

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.generation = 1
        self.read_rule: str | None = None
        self.write_rule: str | None = None
        self.rule_version = 0

    def value(self) -> dict[str, Any]:
        return {
            "source": "native",
            "partitions": self.partitions,
            "generation": self.generation,
            "readRule": self.read_rule,
            "writeRule": self.write_rule,
            "ruleVersion": self.rule_version,
        }

    @classmethod
    def of(cls, value: dict[str, Any]) -> Config:
        config = cls(value["partitions"])
        config.generation = value["generation"]
        config.read_rule = value["readRule"]
        config.write_rule = value["writeRule"]
        config.rule_version = value["ruleVersion"]
        return config


class Collection:
    """One collection: what is set, and how far each of its partitions has been applied."""

    __slots__ = ("applied", "config", "database", "durable", "lagging", "name", "number")

    def __init__(self, database: str, name: str, config: Config) -> None:
        self.database = database
        self.name = name
        self.config = config
        self.number = 0  # in the view
        self.applied = [0] * config.partitions
        self.durable = True  # False while the record that makes it is on its way
        self.lagging = False  # some of its changes could not be applied to the view

    def stream(self, partition: int) -> str:
        return names.stream_of(self.database, self.name, partition)


def config_entry(name: str, config: Config, operation: str, now_ns: int) -> bytes:
    """A state message of `__collections__/<database>`."""
    headers = {"operation": operation, "timestamp": format_instant(now_ns)}
    return orjson.dumps({"type": "collection", "key": name, "value": config.value(), "headers": headers})


def database_entry(now_ns: int) -> bytes:
    """The first message of a database: it exists."""
    headers = {"operation": "insert", "timestamp": format_instant(now_ns)}
    return orjson.dumps({"type": "database", "key": "", "value": {}, "headers": headers})


class Book:
    """All collections of a server. Follows the log; owned by the loop thread."""

    def __init__(self, log: Log, path: Path) -> None:
        self.log = log
        self.view = View(path)
        self.databases: dict[str, dict[str, Collection]] = {names.DATABASE_DEFAULT: {}}
        self._by_stream: dict[str, tuple[Collection, int]] = {}
        # Told of every change that is durable, before the view has it.
        self.on_applied: Callable[[Collection, Change], None] | None = None
        self.changes = 0
        self._unapplied: dict[Collection, tuple[list[Row], list[WriteRow]]] = {}

    async def start(self) -> None:
        """Reads what there is, and what the view lacks of it."""
        for stream in self._streams(names.COLLECTIONS):
            await self._load(stream)
        for collection in self.collections():
            if self._is_ahead(collection):
                logger.warning("the view of %s is ahead of its changes and is made again", collection.name)
                with self.view.writing():
                    self.view.forget(collection.number)
                self._number(collection)
            for partition in range(collection.config.partitions):
                await self._catch_up(collection, partition)
        self.log.publisher.observers.append(self)

    def close(self) -> None:
        if self in self.log.publisher.observers:
            self.log.publisher.observers.remove(self)
        self.view.close()

    def collections(self) -> Iterator[Collection]:
        for found in self.databases.values():
            yield from found.values()

    # -- finding ---------------------------------------------------------------------------------------

    def database(self, name: str) -> dict[str, Collection]:
        found = self.databases.get(names.check_database(name))
        if found is None:
            raise TailraceError("not_found", f"there is no database {name!r}")
        return found

    def find(self, database: str, name: str) -> Collection | None:
        return self.database(database).get(name)

    def planned(self, database: str, name: str, partitions: int) -> Collection:
        """A collection that is about to be made; `add` makes it known."""
        collection = Collection(database, name, Config(partitions))
        self._number(collection)
        collection.durable = False
        return collection

    def add(self, collection: Collection) -> None:
        self.databases[collection.database][collection.name] = collection

    def drop_unmade(self) -> None:
        """After a commit that failed: collections that did not come into being."""
        for found in self.databases.values():
            for name in [name for name, collection in found.items() if not collection.durable]:
                del found[name]

    def check_applied(self, collection: Collection) -> None:
        """Tries once more to apply what the view lacks; without it nothing true can be said."""
        if collection.lagging:
            self._apply(collection, [], [], {})
            if collection.lagging:
                raise TailraceError("unavailable", "the view of the collection cannot be written")

    # -- following the log -----------------------------------------------------------------------------

    def on_created(self, stream: Stream) -> None:
        """Its first entries are told of by `on_published`."""

    def on_removed(self, stream: Stream) -> None:
        self._by_stream.pop(stream.name, None)

    def on_published(self, stream: Stream) -> None:
        if not stream.name.startswith(names.CHANGES):
            return
        found = self._by_stream.get(stream.name) or self._place(stream.name)
        if found is not None:
            self._drain(stream, *found)

    def _place(self, name: str) -> tuple[Collection, int] | None:
        database, _, rest = name.removeprefix(names.CHANGES).partition("/")
        path, _, partition = rest.rpartition("/")
        collection = self.databases.get(database, {}).get(path)
        if collection is None:
            logger.error("changes in %s, of which no collection is known", name)
            return None
        found = self._by_stream[name] = (collection, int(partition))
        return found

    def _drain(self, stream: Stream, collection: Collection, partition: int) -> None:
        rows: list[Row] = []
        writes: list[WriteRow] = []
        collection.durable = True
        applied = collection.applied
        while applied[partition] < stream.visible:
            page = self.log.reader.try_read_labelled(stream, applied[partition], PAGE_BYTES, PAGE_ENTRIES)
            if not isinstance(page, Page):
                logger.error("changes of %s left memory before they were applied", stream.name)
                collection.lagging = True
                return
            self._take(collection, partition, page, rows, writes)
        self._apply(collection, rows, writes, {partition: applied[partition]})

    def _take(
        self, collection: Collection, partition: int, page: Page, rows: list[Row], writes: list[WriteRow]
    ) -> None:
        """Shows the changes of a page, one by one, and gathers what the view is to know."""
        assert page.labels is not None
        for seq, raw, time_ns in zip(page.entries(), page.parts, page.labels.times, strict=True):
            change = decode(bytes(raw), partition, seq, time_ns)
            if change is not None:
                self.changes += 1
                rows.append(row_of(change))
                if change.entry.writeId is not None:
                    writes.append(write_of(change))
                if self.on_applied is not None:
                    self.on_applied(collection, change)
            collection.applied[partition] = seq

    def _apply(
        self, collection: Collection, rows: list[Row], writes: list[WriteRow], positions: dict[int, int]
    ) -> None:
        older = self._unapplied.pop(collection, None)
        if older is not None:
            rows, writes = older[0] + rows, older[1] + writes
            positions = dict(enumerate(collection.applied))
        try:
            with self.view.writing():
                self.view.apply(collection.number, rows, writes, positions)
        except apsw.Error:
            logger.exception("the view of %s cannot be written", collection.name)
            self._unapplied[collection] = (rows, writes)
            collection.lagging = True
        else:
            collection.lagging = False

    # -- starting --------------------------------------------------------------------------------------

    def _streams(self, prefix: str) -> Iterator[Stream]:
        after = ""
        while page := list_streams(self.log, after, prefix, 1000, system=True):
            yield from page
            after = page[-1].name

    def _is_ahead(self, collection: Collection) -> bool:
        """Somebody put other files into the directory: the log decides."""
        for partition, seq in enumerate(collection.applied):
            stream = self.log.find(collection.stream(partition)) if seq else None
            if seq and (stream is None or stream.visible < seq):
                return True
        return False

    def _number(self, collection: Collection) -> None:
        """Finds the collection's place in the view, and how far that has got."""
        number = self.view.number_of(collection.database, collection.name, self.generation(collection))
        collection.number = number
        collection.applied = self.view.positions(number, collection.config.partitions)

    def generation(self, collection: Collection) -> int:
        """Rises when continuity cannot be proved, as after a bootstrap that may have lost the tail."""
        return collection.config.generation + self.log.streams.first_epoch

    async def _load(self, stream: Stream) -> None:
        """A database and what is said of its collections, the last word on each."""
        database = stream.name.removeprefix(names.COLLECTIONS)
        values: dict[str, dict[str, Any]] = {}
        position = stream.earliest
        while position < stream.visible:
            page = await self.log.reader.read_labelled(stream, position, PAGE_BYTES, PAGE_ENTRIES)
            position = page.next_entry
            for raw in page.parts:
                message = orjson.loads(raw)
                if message["type"] == "collection":
                    values[message["key"]] = message["value"]
        found = self.databases.setdefault(database, {})
        for name, value in values.items():
            found[name] = collection = Collection(database, name, Config.of(value))
            self._number(collection)

    async def _catch_up(self, collection: Collection, partition: int) -> None:
        stream = self.log.find(collection.stream(partition))
        if stream is None or stream.visible < 0:
            return
        applied = collection.applied
        while applied[partition] < stream.visible:
            page = await self.log.reader.read_labelled(stream, applied[partition], PAGE_BYTES, PAGE_ENTRIES)
            rows: list[Row] = []
            writes: list[WriteRow] = []
            self._take(collection, partition, page, rows, writes)
            self._apply(collection, rows, writes, {partition: applied[partition]})


def row_of(change: Change) -> Row:
    """What the view has to know of a change: a tombstone keeps the data that was there."""
    entry = change.entry
    deleted = entry.op == "delete"
    return Row(
        entry.documentKey,
        change.partition,
        change.seq,
        entry.version,
        entry.createdAt,
        change.updated_ms,
        int(deleted),
        bytes(entry.before if deleted else entry.after),
    )


def write_of(change: Change) -> WriteRow:
    entry = change.entry
    assert entry.writeId is not None
    place = 0 if entry.txn is None else entry.txn.index
    return WriteRow(entry.writeId, change.updated_ms, place, entry.documentKey, entry.version, entry.op)
