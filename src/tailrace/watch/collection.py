"""A collection: its configuration, state, counters, and cached before-images.

Metric labels are bounded: the first collections have counters of their own, all others share one set, and a
collection never changes sets, so no counter goes down.

With `storeBefore: false` the log does not store what a document was before a change. It is taken from the
document view when the change is applied, and cached for a while for readers that are behind.
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
# Where a duplicate was detected and dropped.
STAGES: Final = ("source", "write", "push", "snapshot")


class CollectionCounters:
    """The counters of one pair of metric labels."""

    __slots__ = ("bloom_rebuilds", "changes", "dropped", "labels", "latency", "matched")

    def __init__(self, labels: MetricLabels) -> None:
        self.labels = labels
        self.changes: Counter[tuple[str, int]] = Counter()  # by op and partition
        self.dropped: dict[str, int] = dict.fromkeys(STAGES, 0)
        # Candidates, hits and library evaluations of matchers that are gone.
        self.matched = (0, 0, 0)
        self.latency = Histogram(MATCH_BUCKETS_S)
        self.bloom_rebuilds = 0

    def add_matched(self, counts: tuple[int, int, int]) -> None:
        candidates, hits, fallbacks = self.matched
        self.matched = (candidates + counts[0], hits + counts[1], fallbacks + counts[2])


class CounterRegistry:
    """The counters of all collections. Owned by the loop thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.others = CollectionCounters(OTHER_LABELS)
        self._own: dict[MetricLabels, CollectionCounters] = {}

    def for_collection(self, collection: Collection | None) -> CollectionCounters:
        """The counters of a collection; the shared ones if it does not exist."""
        if collection is None:
            return self.others
        if collection.counters is None:
            collection.counters = self._for_labels((collection.database, collection.name))
        return collection.counters

    def _for_labels(self, labels: MetricLabels) -> CollectionCounters:
        if labels not in self._own and len(self._own) >= self._most:
            return self.others
        return self._own.setdefault(labels, CollectionCounters(labels))

    def forget(self, collection: Collection) -> None:
        """Drop the counters of a deleted collection; shared counters stay."""
        if collection.counters is not None and collection.counters is not self.others:
            self._own.pop(collection.counters.labels, None)

    def all(self) -> list[CollectionCounters]:
        return [*self._own.values(), self.others]


ENTRY_BYTES: Final = 250  # overhead of one cached image


class BeforeImageLimits(NamedTuple):
    """Bounds of the cache; the first that is reached applies."""

    changes_max: int
    bytes_max: int
    age_ms_max: int


class _CachedImage(NamedTuple):
    partition: int
    seq: int
    at_ms: int


class BeforeImageCache:
    """Images in log order; `evicted` says from where on each partition is complete."""

    __slots__ = ("_bounds", "_bytes", "_data", "_order", "evicted")

    def __init__(self, bounds: BeforeImageLimits, forgotten: Sequence[int]) -> None:
        self._bounds = bounds
        self._data: dict[tuple[int, int], bytes] = {}
        self._order: deque[_CachedImage] = deque()
        self._bytes = 0
        # Per partition: the last change whose image was evicted; all before it are gone too.
        self.evicted = list(forgotten)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def add(self, partition: int, seq: int, at_ms: int, data: bytes) -> None:
        self._data[partition, seq] = data
        self._order.append(_CachedImage(partition, seq, at_ms))
        self._bytes += len(data) + ENTRY_BYTES
        self._evict(at_ms)

    def find(self, partition: int, seq: int) -> bytes | None:
        return self._data.get((partition, seq))

    def covers(self, positions: Sequence[int]) -> bool:
        """Whether all changes after these positions have their image."""
        return not any(map(int.__lt__, positions, self.evicted))

    def _evict(self, now_ms: int) -> None:
        bounds, order = self._bounds, self._order
        while order and (
            len(order) > bounds.changes_max
            or self._bytes > bounds.bytes_max
            or now_ms - order[0].at_ms > bounds.age_ms_max
        ):
            partition, seq, _ = order.popleft()
            self._bytes -= len(self._data.pop((partition, seq))) + ENTRY_BYTES
            self.evicted[partition] = max(self.evicted[partition], seq)


# loading: no changes are delivered until it is live. stale: the documents may be wrong.
CollectionState = Literal["live", "loading", "lagging", "stale"]
NATIVE: Final = "native"


class Slo(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Service objectives of a collection; None: the server's default."""

    delivery_ms: int | None = None
    resume_ratio: float | None = None
    lag_ms: int | None = None
    bloom_ratio: float | None = None


class ReplicationConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Settings for clients that replicate the collection."""

    # Content sent in place of a document that the reader may no longer see.
    tombstone_fields: dict[str, Any] = {}


class CollectionConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The configuration of a collection; replaced as a whole when it changes."""

    partitions: int
    source: str = NATIVE
    generation: int = 1
    read_rule: str | None = None
    write_rule: str | None = None
    rule_version: int = 0
    retention: str | None = None  # None: the server's default; 0: unlimited
    tombstone_ttl: str | None = None  # likewise
    store_before: bool = True  # False: before-images come from the view, not from the log
    slo: Slo | None = None
    replication: ReplicationConfig | None = None

    def value(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> CollectionConfig:
        return msgspec.convert(value, cls)

    def retention_s(self, limits: Limits) -> int | None:
        """Minimum retention of changes; None: unlimited."""
        return _duration_s(self.retention, limits.watch_retention_ms)

    def tombstone_s(self, limits: Limits) -> int | None:
        """How long tombstones are retained; None: unlimited."""
        return _duration_s(self.tombstone_ttl, limits.watch_tombstone_ms)

    def with_changes(self, **changed: Any) -> CollectionConfig:
        return msgspec.structs.replace(self, **changed)


def _duration_s(text: str | None, default_ms: int) -> int | None:
    seconds = -(-default_ms // 1000) if text is None else parse_duration_s(text, "")
    return seconds or None


def check_duration(value: object, name: str) -> str | None:
    """A duration in a request: `7d`, `12h`, `0` for unlimited, null for the server's default."""
    if value is None:
        return None
    try:
        if not isinstance(value, str):
            raise TailraceError("invalid_request", name)
        parse_duration_s(value, name)
    except TailraceError:
        raise TailraceError(
            "invalid_request", f"{name} must be a string such as 90, 90s, 15m, 12h or 7d, or null"
        ) from None
    return value


def format_duration(seconds: int | None) -> str:
    """In the largest unit without a remainder; `0` for unlimited."""
    if seconds is None:
        return "0"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


class Collection:
    """One collection: configuration, and the applied position of each partition."""

    __slots__ = (
        "applied",
        "before_images",
        "bloom_ratio",
        "config",
        "counters",
        "database",
        "durable",
        "lagging",
        "name",
        "number",
        "pending",
        "published_ms",
        "published_positions",
        "purged",
        "state",
    )

    def __init__(self, database: str, name: str, config: CollectionConfig) -> None:
        self.database = database
        self.name = name
        self.config = config
        self.pending: CollectionConfig | None = None  # accepted, not yet durable
        self.number = 0  # its key in the document view
        self.applied = [0] * config.partitions
        self.purged = [0] * config.partitions  # highest version of a purged tombstone
        self.published_positions: list[int] | None = None  # of the newest published view
        self.published_ms = 0  # time of that view
        self.before_images: BeforeImageCache | None = None  # only without store_before
        self.durable = True  # False until its creation is durable
        self.lagging = False  # some changes could not be applied to the view
        self.state: CollectionState = "live"
        # False-positive ratio of its Bloom filter, as last reported by a job.
        self.bloom_ratio: float | None = None
        self.counters: CollectionCounters | None = None

    @property
    def effective_config(self) -> CollectionConfig:
        """The newest accepted configuration, durable or not."""
        return self.config if self.pending is None else self.pending

    @property
    def reported_state(self) -> CollectionState:
        """The state as reported to clients."""
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
    """The first message of a database: it is created."""
    headers = {"operation": "insert", "timestamp": format_rfc3339(now_ns)}
    return orjson.dumps({"type": "database", "key": "", "value": {}, "headers": headers})


def encode_control_entry(control: str, generation: int, **more: Any) -> bytes:
    """A control entry of a change stream; readers skip controls that they do not know."""
    return orjson.dumps({"v": 1, "kind": "control", "control": control, "generation": generation, **more})


def complete_before_images(
    view: DocumentView,
    collection: Collection,
    changes: Sequence[Change],
    rows: Iterable[DocumentRow],
    bounds: BeforeImageLimits,
) -> bool:
    """Set the before-images of changes in log order; False if any is not known.

    `rows` are newer documents that are not in the view yet.
    """
    missing = {change.entry.documentKey for change in changes if change.lacks_before_image}
    known = {row.id: (row.version, row.data) for row in rows if row.id in missing}
    stored = view.find_many(collection.number, [one for one in missing if one not in known])
    known |= {row.id: (row.version, row.data) for row in stored.values()}
    if collection.before_images is None:
        collection.before_images = BeforeImageCache(bounds, [0] * collection.config.partitions)
    whole = True
    for change in changes:
        entry = change.entry
        if entry.documentKey not in missing:
            continue
        if change.lacks_before_image:
            version, data = known.get(entry.documentKey, (0, b""))
            if entry.prev is not None and entry.prev.version == version:
                change.set_before_image(data)
                collection.before_images.add(change.partition, change.seq, change.updated_ms, data)
            else:
                whole = False
        if entry.op != "delete":
            known[entry.documentKey] = (entry.version, bytes(entry.after))
    return whole


def complete_from_cache(collection: Collection, change: Change) -> None:
    """Set the before-image of a change that is read again, if it is still cached."""
    if change.lacks_before_image and collection.before_images is not None:
        data = collection.before_images.find(change.partition, change.seq)
        if data is not None:
            change.set_before_image(data)
