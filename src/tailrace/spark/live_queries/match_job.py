"""`tailrace pipeline match`: live queries matched over a range of changes, deliveries written.

What runs in a Python worker over the entries of change streams. Found by name, never sent along.

`tailrace pipeline match`: who would have been told what, over a bounded range of the log.

The choice of subscriptions and ranges is made once. With a checkpoint it is kept there, so that a job that
was killed and is run again does the same; the sink sees to it that nothing is appended twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from tailrace.protocol import offsets
from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.live_queries.subscription_matcher import match_change
from tailrace.spark.live_queries.subscription_sets import (
    read_subscription_set,
    shared_compiled_set,
    store_subscription_set,
)
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.object_stores import shared_object_store
from tailrace.spark.options import store_url
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.segments.parquet import BINARY, STRING, pa
from tailrace.watch import external_matching
from tailrace.watch.document import Change, decode_change
from tailrace.watch.external_matching import DeliveredChange, DeliveredMatch, DeliveryBatch

DELIVERY_BYTES: Final = 1 << 20  # of items in one delivery
DELIVERY_SEQS: Final = 1000  # examined by one delivery, at numbers that are multiples of it
DELIVERY_SCHEMA: Final = pa.schema([("stream", STRING), ("value", BINARY)])
DELIVERY_DDL: Final = "stream string, value binary"


class MatchTask(msgspec.Struct, frozen=True):
    """What a task is told: plain values."""

    store: str
    index: str
    target: str
    owner: str
    ranges: dict[str, ChangeRange]  # by stream
    as_of: int = 0  # entry of the summaries up to which the subscriptions were read


class ChangeStreamEntry(NamedTuple):
    """An entry of a change stream; without a change it is one that readers pass over."""

    range: ChangeRange
    seq: int
    offset: str
    change: Change | None


def decode_entries(batch: Any, ranges: dict[str, ChangeRange]) -> Iterator[ChangeStreamEntry]:
    columns = (
        batch.column(name).to_pylist() for name in ("stream", "offset", "entry", "timestamp_ns", "value")
    )
    for stream, offset, seq, time_ns, value in zip(*columns, strict=True):
        one = ranges[stream]
        yield ChangeStreamEntry(one, seq, offset, decode_change(value, one.partition, seq, time_ns))


def match_changes(task: MatchTask, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: entries in, deliveries out. Every entry is in the range of exactly one delivery."""
    matchers = shared_compiled_set(task.store, task.index).matchers
    writer: _DeliveryWriter | None = None
    for batch in batches:
        hit_failpoint("mid_build", "worker")
        made: list[bytes] = []
        for entry in decode_entries(batch, task.ranges):
            if writer is None or writer.range is not entry.range:
                writer = _DeliveryWriter(task, entry.range)
            told = (
                []
                if entry.change is None
                else match_change(matchers.get(entry.range.collection), entry.change)
            )
            made += writer.add(entry, told)
        yield pa.RecordBatch.from_arrays(
            [pa.array([task.target] * len(made), STRING), pa.array(made, BINARY)], schema=DELIVERY_SCHEMA
        )


class _DeliveryWriter:
    """The deliveries of one partition, one behind the other.

    Where they are cut depends on the entries alone, so that a job that is run again sends the same ones.
    """

    def __init__(self, task: MatchTask, one: ChangeRange) -> None:
        self._task = task
        self.range = one
        self._after = one.after
        self._reached = one.after
        self._items: list[DeliveredChange] = []
        self._bytes = 0

    def add(self, entry: ChangeStreamEntry, told: list[DeliveredMatch]) -> list[bytes]:
        self._reached = entry.seq
        if entry.change is not None and told:
            item = build_delivery_item(entry.change, entry.change.lsn or entry.offset, told)
            self._items.append(item)
            self._bytes += len(bytes(entry.change.entry.after)) + sum(len(one.key) + 40 for one in told)
        full = self._bytes >= DELIVERY_BYTES or entry.seq % DELIVERY_SEQS == 0 or entry.seq == self.range.upto
        return self._flushed() if full else []

    def _flushed(self) -> list[bytes]:
        one = self.range
        batch = DeliveryBatch(
            database=one.database,
            collection=one.collection,
            partition=one.partition,
            owner=self._task.owner,
            generation=one.generation,
            index=self._task.index,
            asOf=self._task.as_of,
            first=self._after + 1,
            last=self._reached,
            items=self._items,
        )
        self._after, self._items, self._bytes = self._reached, [], 0
        return [external_matching.encode_delivery(batch)]


def build_delivery_item(change: Change, lsn: str, told: list[DeliveredMatch]) -> DeliveredChange:
    """A delete carries the document's name and version, and never its content."""
    entry = change.entry
    doc: dict[str, Any] = {"id": entry.documentKey, "version": entry.version}
    if any(one.op in ("insert", "update") for one in told):
        doc["data"] = orjson.loads(bytes(entry.after))
        doc["createdAt"], doc["updatedAt"] = entry.createdAt, change.updated_ms
    return DeliveredChange(change.seq, lsn, entry.op, told, doc)


MATCH_PLAN_FILE: Final = "match.json"


class MatchOptions(NamedTuple):
    database: str
    collections: str = "**"
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    store: str | None = None
    checkpoint: str | None = None


class MatchPlan(msgspec.Struct, frozen=True):
    """What a run is about, whoever runs it."""

    index: str
    subscriptions: int
    gateway: str
    target: str
    ranges: list[ChangeRange]
    as_of: int = 0  # entry of the summaries up to which the subscriptions were read

    @property
    def producer(self) -> str:
        return f"match-{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]}"

    @property
    def owner(self) -> str:
        return f"spark:{self.producer}"


class MatchReport(msgspec.Struct, frozen=True):
    database: str
    gateway: str
    deliveries: str
    owner: str
    index: str
    subscriptions: int
    collections: list[str]
    changes: int
    ranges: list[ChangeRange]


def run_match(spark: Any, place: WatchClient, options: MatchOptions) -> MatchReport:
    """Matches the range and writes deliveries."""
    announced = place.announce(options.database)
    try:
        store = options.store or place.store()
        choice = _load_or_create_plan(place, options, store, announced)
        hit_failpoint("after_checkpoint", "driver")
        if choice.ranges:
            _write_deliveries(spark, place, options, store, choice, announced.token)
        hit_failpoint("after_publish", "driver")
    finally:
        place.announce(options.database, 0)
    return MatchReport(
        options.database,
        choice.gateway,
        choice.target,
        choice.owner,
        choice.index,
        choice.subscriptions,
        sorted({one.collection for one in choice.ranges}),
        sum(one.upto - one.after for one in choice.ranges),
        choice.ranges,
    )


def _load_or_create_plan(place: WatchClient, options: MatchOptions, store: str, announced: Any) -> MatchPlan:
    kept = None if options.checkpoint is None else shared_object_store(store_url(options.checkpoint))
    if kept is not None:
        try:
            return msgspec.json.decode(kept.get(MATCH_PLAN_FILE), type=MatchPlan)
        except ObjectMissingError:
            pass
    names = place.matchable(options.database, options.collections)
    ranges = [
        one for name in names for one in place.ranges(options.database, name, options.start, options.end)
    ]
    subscriptions = read_subscription_set(
        place.server, announced.stream, announced.offset, options.database, names
    )
    index = store_subscription_set(store, subscriptions)
    as_of = offsets.parse_offset(announced.offset)[1]
    count = len(subscriptions.subs)
    choice = MatchPlan(index, count, announced.gateway, announced.deliveries, ranges, as_of)
    if kept is not None and not kept.create(MATCH_PLAN_FILE, msgspec.json.encode(choice)):
        return msgspec.json.decode(kept.get(MATCH_PLAN_FILE), type=MatchPlan)  # somebody was faster
    return choice


def _write_deliveries(
    spark: Any, place: WatchClient, options: MatchOptions, store: str, choice: MatchPlan, token: str | None
) -> None:
    ranges = {one.stream: one for one in choice.ranges}
    task = MatchTask(store, choice.index, choice.target, choice.owner, ranges, choice.as_of)
    found = place.frame(spark, choice.ranges).mapInArrow(partial(match_changes, task), DELIVERY_DDL)
    given = {name: value for name, value in place.given.items() if name in CONNECTION_OPTION_NAMES}
    if token is not None:
        given["token"] = token
        given.pop("tokenFile", None)
    writing = (
        found.write.format("tailrace")
        .mode("append")
        .options(**given)
        .option("createStream", "false")
        .option("producerId", choice.producer)
    )
    if options.checkpoint is None:
        # The same rows on every attempt, in the same tasks: nothing has to be put aside.
        writing = writing.option("delivery", "direct")
    else:
        writing = writing.option("stagingLocation", f"{options.checkpoint.rstrip('/')}/staging")
    writing.save()


CONNECTION_OPTION_NAMES: Final = frozenset(
    ("endpoint", "token", "tokenFile", "tls.caFile", "requestTimeout", "fetchBytes", "retries")
)
