"""A collection: configuration, state, counters and cached before-images.

What is counted for each collection, under labels of which there are never too many.

The first so many collections have their own; what happens in all others is counted together. Whoever is
counted with the others stays there, so that no counter ever goes down.

What documents were before their latest changes, for a collection whose log does not keep that.

A collection: what is set about it, and how far its changes have been looked at.

Changes that leave out what their documents were before: the view still has it when they are looked at.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.metrics import Histogram
from tailrace.common.server_metrics import MATCH_BUCKETS_S
from tailrace.common.timestamps import format_rfc3339, parse_duration_s
from tailrace.watch import names
from tailrace.watch.document import Change
from tailrace.watch.document_view import DocumentRow, DocumentView

MetricLabels = tuple[str, str]  # database and collection

OTHER_LABELS: Final[MetricLabels] = ("*", "*")  # no name has a star
# Where something that came twice was noticed, and left out.
STAGES: Final = ("source", "write", "push", "snapshot")


class CollectionCounters:
    """The counters behind one pair of labels."""

    __slots__ = ("bloom_rebuilds", "changes", "dropped", "labels", "latency", "matched")

    def __init__(self, labels: MetricLabels) -> None:
        self.labels = labels
        self.changes: Counter[tuple[str, int]] = Counter()  # by op and partition
        self.dropped: dict[str, int] = dict.fromkeys(STAGES, 0)
        # Candidates, hits and library evaluations of what is watched no more.
        self.matched = (0, 0, 0)
        self.latency = Histogram(MATCH_BUCKETS_S)
        self.bloom_rebuilds = 0

    def add_matched(self, counts: tuple[int, int, int]) -> None:
        candidates, hits, fallbacks = self.matched
        self.matched = (candidates + counts[0], hits + counts[1], fallbacks + counts[2])


class CounterRegistry:
    """Owned by the loop thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.others = CollectionCounters(OTHER_LABELS)
        self._own: dict[MetricLabels, CollectionCounters] = {}

    def of(self, collection: Collection | None) -> CollectionCounters:
        """Where a collection is counted; one that does not exist is one of the others."""
        if collection is None:
            return self.others
        if collection.tally is None:
            collection.tally = self._given((collection.database, collection.name))
        return collection.tally

    def _given(self, labels: MetricLabels) -> CollectionCounters:
        if labels not in self._own and len(self._own) >= self._most:
            return self.others
        return self._own.setdefault(labels, CollectionCounters(labels))

    def forget(self, collection: Collection) -> None:
        """It is gone, and so are its numbers; those of the others stay."""
        if collection.tally is not None and collection.tally is not self.others:
            self._own.pop(collection.tally.labels, None)

    def all(self) -> list[CollectionCounters]:
        return [*self._own.values(), self.others]


ENTRY_BYTES: Final = 250  # of one that is remembered, beside its content


class BeforeImageLimits(NamedTuple):
    """How much is remembered; whichever is reached first."""

    changes_max: int
    bytes_max: int
    age_ms_max: int


class _CachedImage(NamedTuple):
    partition: int
    seq: int
    at_ms: int


class BeforeImageCache:
    """Oldest first; what goes is told by how far back each partition still reaches."""

    __slots__ = ("_bounds", "_bytes", "_data", "_order", "forgotten")

    def __init__(self, bounds: BeforeImageLimits, forgotten: Sequence[int]) -> None:
        self._bounds = bounds
        self._data: dict[tuple[int, int], bytes] = {}
        self._order: deque[_CachedImage] = deque()
        self._bytes = 0
        # The last change of each partition, the ones before it included, that cannot be told any more.
        self.forgotten = list(forgotten)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def add(self, partition: int, seq: int, at_ms: int, data: bytes) -> None:
        self._data[partition, seq] = data
        self._order.append(_CachedImage(partition, seq, at_ms))
        self._bytes += len(data) + ENTRY_BYTES
        self._shrink(at_ms)

    def find(self, partition: int, seq: int) -> bytes | None:
        return self._data.get((partition, seq))

    def reaches(self, positions: Sequence[int]) -> bool:
        """Whether whoever has everything up to these positions can be told what followed."""
        return not any(map(int.__lt__, positions, self.forgotten))

    def _shrink(self, now_ms: int) -> None:
        bounds, order = self._bounds, self._order
        while order and (
            len(order) > bounds.changes_max
            or self._bytes > bounds.bytes_max
            or now_ms - order[0].at_ms > bounds.age_ms_max
        ):
            partition, seq, _ = order.popleft()
            self._bytes -= len(self._data.pop((partition, seq))) + ENTRY_BYTES
            self.forgotten[partition] = max(self.forgotten[partition], seq)


# loading: nobody is told anything before it is live. stale: what there is may be wrong.
CollectionState = Literal["live", "loading", "lagging", "stale"]
NATIVE: Final = "native"


class Slo(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the collection's readers may expect; None takes the server's."""

    delivery_ms: int | None = None
    resume_ratio: float | None = None
    lag_ms: int | None = None
    bloom_ratio: float | None = None


class ReplicationConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What clients that replicate the collection need beside its documents."""

    # What stands in for the content of a document that its reader may not see any more.
    tombstone_fields: dict[str, Any] = {}


class CollectionConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is set about a collection; each change of it is a new one."""

    partitions: int
    source: str = NATIVE
    generation: int = 1
    read_rule: str | None = None
    write_rule: str | None = None
    rule_version: int = 0
    retention: str | None = None  # None: the server's; 0 keeps everything
    tombstone_ttl: str | None = None  # likewise
    store_before: bool = True  # False: changes do not say what was there before, and the view has to
    slo: Slo | None = None
    replication: ReplicationConfig | None = None

    def value(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @classmethod
    def of(cls, value: dict[str, Any]) -> CollectionConfig:
        return msgspec.convert(value, cls)

    def retention_s(self, limits: Limits) -> int | None:
        """How long changes are kept at least; None for ever."""
        return _duration_s(self.retention, limits.watch_retention_ms)

    def tombstone_s(self, limits: Limits) -> int | None:
        """How long a deleted document is remembered; None for ever."""
        return _duration_s(self.tombstone_ttl, limits.watch_tombstone_ms)

    def replaced(self, **changed: Any) -> CollectionConfig:
        return msgspec.structs.replace(self, **changed)


def _duration_s(text: str | None, default_ms: int) -> int | None:
    seconds = -(-default_ms // 1000) if text is None else parse_duration_s(text, "")
    return seconds or None


def check_duration(given: object, name: str) -> str | None:
    """A length of time as it is set: `7d`, `12h`, `0` for ever, or null for the server's."""
    if given is None:
        return None
    try:
        if not isinstance(given, str):
            raise TailraceError("invalid_request", name)
        parse_duration_s(given, name)
    except TailraceError:
        raise TailraceError(
            "invalid_request", f"{name} is whole seconds or <n>s, m, h or d as a text, or null"
        ) from None
    return given


def format_duration(seconds: int | None) -> str:
    """As a person would say it."""
    if seconds is None:
        return "0"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


class Collection:
    """One collection: what is set, and how far each of its partitions has been applied."""

    __slots__ = (
        "applied",
        "base",
        "befores",
        "bloom_ratio",
        "config",
        "database",
        "durable",
        "lagging",
        "name",
        "number",
        "pending",
        "published_ms",
        "purged",
        "state",
        "tally",
    )

    def __init__(self, database: str, name: str, config: CollectionConfig) -> None:
        self.database = database
        self.name = name
        self.config = config
        self.pending: CollectionConfig | None = None  # decided, and on its way to the disk
        self.number = 0  # in the view
        self.applied = [0] * config.partitions
        self.purged = [0] * config.partitions  # highest version of a tombstone that was given up
        self.base: list[int] | None = None  # where the newest published view stands
        self.published_ms = 0  # when that was
        self.befores: BeforeImageCache | None = None  # what its changes do not say themselves
        self.durable = True  # False while the record that makes it is on its way
        self.lagging = False  # some of its changes could not be applied to the view
        self.state: CollectionState = "live"
        # Of the answers of its Bloom filter, how many were wrong when a job made it last.
        self.bloom_ratio: float | None = None
        self.tally: CollectionCounters | None = None

    @property
    def decided(self) -> CollectionConfig:
        """What the next decision has to go by: durable or not."""
        return self.config if self.pending is None else self.pending

    @property
    def shown_state(self) -> CollectionState:
        """As it is told: whoever lags is not what it was before."""
        return "lagging" if self.lagging else self.state

    def stream(self, partition: int) -> str:
        return names.change_stream_name(self.database, self.name, partition)

    def streams(self) -> list[str]:
        return [self.stream(partition) for partition in range(self.config.partitions)]


def encode_config_entry(name: str, config: CollectionConfig, operation: str, now_ns: int) -> bytes:
    """A state message of `__collections__/<database>`."""
    headers = {"operation": operation, "timestamp": format_rfc3339(now_ns)}
    return orjson.dumps({"type": "collection", "key": name, "value": config.value(), "headers": headers})


def encode_database_entry(now_ns: int) -> bytes:
    """The first message of a database: it exists."""
    headers = {"operation": "insert", "timestamp": format_rfc3339(now_ns)}
    return orjson.dumps({"type": "database", "key": "", "value": {}, "headers": headers})


def encode_control_entry(control: str, generation: int, **more: Any) -> bytes:
    """An entry of a change stream that is no change; readers that do not know it pass over it."""
    return orjson.dumps({"v": 1, "kind": "control", "control": control, "generation": generation, **more})


def complete_before_images(
    view: DocumentView,
    collection: Collection,
    changes: Sequence[Change],
    rows: Iterable[DocumentRow],
    bounds: BeforeImageLimits,
) -> bool:
    """Whether all of them, in the order of the log, say now what was there before.

    `rows` are what was looked at already and is not in the view yet.
    """
    wanted = {change.entry.documentKey for change in changes if change.is_half}
    known = {row.id: (row.version, row.data) for row in rows if row.id in wanted}
    stored = view.find_many(collection.number, [one for one in wanted if one not in known])
    known |= {row.id: (row.version, row.data) for row in stored.values()}
    if collection.befores is None:
        collection.befores = BeforeImageCache(bounds, [0] * collection.config.partitions)
    whole = True
    for change in changes:
        entry = change.entry
        if entry.documentKey not in wanted:
            continue
        if change.is_half:
            version, data = known.get(entry.documentKey, (0, b""))
            if entry.prev is not None and entry.prev.version == version:
                change.complete(data)
                collection.befores.add(change.partition, change.seq, change.updated_ms, data)
            else:
                whole = False
        if entry.op != "delete":
            known[entry.documentKey] = (entry.version, bytes(entry.after))
    return whole


def complete_from_cache(collection: Collection, change: Change) -> None:
    """As `complete`, for a change that is read again: as long as it is remembered."""
    if change.is_half and collection.befores is not None:
        data = collection.befores.find(change.partition, change.seq)
        if data is not None:
            change.complete(data)
