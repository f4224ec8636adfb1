"""`tailrace pipeline match`: matches live queries over a range of changes and writes deliveries.

The match plan fixes subscriptions and ranges. With a checkpoint it is stored there, so that a restarted job
does the same work; the sink drops appends that were sent before. `match_changes` runs in Python workers,
which need the installed package: it is pickled by name.
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
from tailrace.spark.options import CONNECTION_OPTIONS, store_url
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.segments.parquet import BINARY, STRING, pa
from tailrace.watch import external_matching
from tailrace.watch.document import Change, decode_change
from tailrace.watch.external_matching import DeliveredChange, DeliveredMatch, DeliveryBatch

DELIVERY_BYTES: Final = 1 << 20  # of items in one delivery
DELIVERY_SEQS: Final = 1000  # deliveries also end at entries whose number is a multiple of this
DELIVERY_SCHEMA: Final = pa.schema([("stream", STRING), ("value", BINARY)])
DELIVERY_DDL: Final = "stream string, value binary"


class MatchTask(msgspec.Struct, frozen=True):
    store: str
    index: str
    target: str
    owner: str
    ranges: dict[str, ChangeRange]  # by stream
    as_of: int = 0  # the last entry of the summaries that was read


class ChangeStreamEntry(NamedTuple):
    """An entry of a change stream. `change` is None for entries that readers skip."""

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
    """For `mapInArrow`: the deliveries for entries. Every entry is in the range of exactly one delivery."""
    matchers = shared_compiled_set(task.store, task.index).matchers
    writer: _DeliveryWriter | None = None
    for batch in batches:
        hit_failpoint("mid_build", "worker")
        deliveries: list[bytes] = []
        for entry in decode_entries(batch, task.ranges):
            if writer is None or writer.range is not entry.range:
                writer = _DeliveryWriter(task, entry.range)
            matches = (
                []
                if entry.change is None
                else match_change(matchers.get(entry.range.collection), entry.change)
            )
            deliveries += writer.add(entry, matches)
        yield pa.RecordBatch.from_arrays(
            [pa.array([task.target] * len(deliveries), STRING), pa.array(deliveries, BINARY)],
            schema=DELIVERY_SCHEMA,
        )


class _DeliveryWriter:
    """Builds the deliveries of one partition.

    Their limits depend on the entries only, so that a repeated job sends the same deliveries.
    """

    def __init__(self, task: MatchTask, one: ChangeRange) -> None:
        self._task = task
        self.range = one
        self._after = one.after
        self._reached = one.after
        self._items: list[DeliveredChange] = []
        self._bytes = 0

    def add(self, entry: ChangeStreamEntry, matches: list[DeliveredMatch]) -> list[bytes]:
        self._reached = entry.seq
        if entry.change is not None and matches:
            item = build_delivery_item(entry.change, entry.change.lsn or entry.offset, matches)
            self._items.append(item)
            self._bytes += len(bytes(entry.change.entry.after)) + sum(len(one.key) + 40 for one in matches)
        full = self._bytes >= DELIVERY_BYTES or entry.seq % DELIVERY_SEQS == 0 or entry.seq == self.range.upto
        return self._flush() if full else []

    def _flush(self) -> list[bytes]:
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


def build_delivery_item(change: Change, lsn: str, matches: list[DeliveredMatch]) -> DeliveredChange:
    """A delete has the id and version of the document, but never its content."""
    entry = change.entry
    doc: dict[str, Any] = {"id": entry.documentKey, "version": entry.version}
    if any(one.op in ("insert", "update") for one in matches):
        doc["data"] = orjson.loads(bytes(entry.after))
        doc["createdAt"], doc["updatedAt"] = entry.createdAt, change.updated_ms
    return DeliveredChange(change.seq, lsn, entry.op, matches, doc)


MATCH_PLAN_FILE: Final = "match.json"


class MatchOptions(NamedTuple):
    database: str
    collections: str = "**"
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    store: str | None = None
    checkpoint: str | None = None


class MatchPlan(msgspec.Struct, frozen=True):
    """The input of a match job, stored as match.json."""

    index: str
    subscriptions: int
    gateway: str
    target: str
    ranges: list[ChangeRange]
    as_of: int = 0  # the last entry of the summaries that was read

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


def run_match(spark: Any, client: WatchClient, options: MatchOptions) -> MatchReport:
    """Match the range and write deliveries."""
    summaries = client.request_summaries(options.database)
    try:
        store = options.store or client.store()
        plan = _load_or_create_plan(client, options, store, summaries)
        hit_failpoint("after_checkpoint", "driver")
        if plan.ranges:
            _write_deliveries(spark, client, options, store, plan, summaries.token)
        hit_failpoint("after_publish", "driver")
    finally:
        client.request_summaries(options.database, 0)
    return MatchReport(
        options.database,
        plan.gateway,
        plan.target,
        plan.owner,
        plan.index,
        plan.subscriptions,
        sorted({one.collection for one in plan.ranges}),
        sum(one.upto - one.after for one in plan.ranges),
        plan.ranges,
    )


def _load_or_create_plan(client: WatchClient, options: MatchOptions, store: str, summaries: Any) -> MatchPlan:
    checkpoint = None if options.checkpoint is None else shared_object_store(store_url(options.checkpoint))
    if checkpoint is not None:
        try:
            return msgspec.json.decode(checkpoint.get(MATCH_PLAN_FILE), type=MatchPlan)
        except ObjectMissingError:
            pass
    names = client.matchable_collections(options.database, options.collections)
    ranges = [
        one for name in names for one in client.ranges(options.database, name, options.start, options.end)
    ]
    subscriptions = read_subscription_set(
        client.server, summaries.stream, summaries.offset, options.database, names
    )
    index = store_subscription_set(store, subscriptions)
    as_of = offsets.parse_offset(summaries.offset)[1]
    count = len(subscriptions.subs)
    plan = MatchPlan(index, count, summaries.gateway, summaries.deliveries, ranges, as_of)
    if checkpoint is not None and not checkpoint.create(MATCH_PLAN_FILE, msgspec.json.encode(plan)):
        # Another process has stored its plan first.
        return msgspec.json.decode(checkpoint.get(MATCH_PLAN_FILE), type=MatchPlan)
    return plan


def _write_deliveries(
    spark: Any, client: WatchClient, options: MatchOptions, store: str, plan: MatchPlan, token: str | None
) -> None:
    ranges = {one.stream: one for one in plan.ranges}
    task = MatchTask(store, plan.index, plan.target, plan.owner, ranges, plan.as_of)
    found = client.frame(spark, plan.ranges).mapInArrow(partial(match_changes, task), DELIVERY_DDL)
    sink_options = {name: value for name, value in client.options.items() if name in CONNECTION_OPTIONS}
    if token is not None:
        sink_options["token"] = token
        sink_options.pop("tokenFile", None)
    writer = (
        found.write.format("tailrace")
        .mode("append")
        .options(**sink_options)
        .option("createStream", "false")
        .option("producerId", plan.producer)
    )
    if options.checkpoint is None:
        # Every attempt gives the same rows in the same tasks, so staging is not needed.
        writer = writer.option("delivery", "direct")
    else:
        writer = writer.option("stagingLocation", f"{options.checkpoint.rstrip('/')}/staging")
    writer.save()
