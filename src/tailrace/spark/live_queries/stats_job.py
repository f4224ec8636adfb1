"""`tailrace pipeline stats`: statistics of the changes and subscriptions of collections.

They have the cardinality of fields, the selectivity of predicates, the skew of partitions, and a Bloom filter
of the values that subscriptions compare with. They contain no values of documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import msgspec
import orjson
import xxhash

from tailrace.spark.live_queries.match_job import decode_entries
from tailrace.spark.live_queries.subscription_matcher import SubscriptionSet, match_change
from tailrace.spark.live_queries.subscription_sets import (
    read_subscription_set,
    shared_compiled_set,
    store_subscription_set,
)
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.object_stores import shared_object_store
from tailrace.storage.segments.parquet import INT32, INT64, STRING, pa
from tailrace.watch.document import RESERVED_FIELDS
from tailrace.watch.evaluator import MISSING, field_getter
from tailrace.watch.external_matching import (
    BITS_PER_KEY,
    HASHES,
    BloomFilter,
    bloom_key,
    interest_from_summary,
)
from tailrace.watch.predicate import Condition, equality_class

STATS_FOLDER: Final = "watch/stats/"
DEPTH_MAX: Final = 4
FIELDS_MAX: Final = 1000
PREDICATES_MAX: Final = 1000

VALUES_SCHEMA: Final = pa.schema([("field", STRING), ("kind", STRING), ("hash", INT64)])
VALUES_DDL: Final = "field string, kind string, hash bigint"
COUNTS_SCHEMA: Final = pa.schema([("what", STRING), ("name", STRING), ("partition", INT32), ("count", INT64)])
COUNTS_DDL: Final = "what string, name string, partition int, count bigint"
_KINDS: Final[dict[type[Any], str]] = {
    type(None): "null",
    bool: "bool",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
}


class StatsOptions(NamedTuple):
    database: str
    collection: str | None = None
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    store: str | None = None


class StatsTask(msgspec.Struct, frozen=True):
    store: str
    index: str
    ranges: dict[str, ChangeRange]


def run_stats(spark: Any, client: WatchClient, options: StatsOptions) -> list[dict[str, Any]]:
    """The statistics of each collection. Each is stored under its hash."""
    store = options.store or client.store()
    database = options.database
    names = client.collections(database, options.collection or "**")
    summaries = client.request_summaries(database)
    try:
        found = read_subscription_set(client.server, summaries.stream, summaries.offset, database, names)
    finally:
        client.request_summaries(database, 0)
    results: list[dict[str, Any]] = []
    for name in names:
        subscriptions = SubscriptionSet(
            {key: one for key, one in found.subs.items() if one.collection == name}
        )
        ranges = client.ranges(database, name, options.start, options.end)
        stats, probed = _collect_statistics(spark, client, store, subscriptions, ranges)
        about = {"v": 1, "database": database, "collection": name, "ranges": msgspec.to_builtins(ranges)}
        body = {**about, **stats}
        body["object"] = f"{STATS_FOLDER}{hashlib.sha256(orjson.dumps(body)).hexdigest()}.json"
        shared_object_store(store).create(body["object"], orjson.dumps(body))
        client.report_statistics(database, name, probed)
        results.append(body)
    return results


def _collect_statistics(
    spark: Any, client: WatchClient, store: str, subscriptions: SubscriptionSet, ranges: Sequence[ChangeRange]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The statistics, and the false positives of the Bloom filter for the server's metrics."""
    keys = bloom_keys(subscriptions)
    data = msgspec.msgpack.encode([BITS_PER_KEY, HASHES, build_bloom(keys).segments])
    filter_name = f"{STATS_FOLDER}{hashlib.sha256(data).hexdigest()}.bloom"
    shared_object_store(store).create(filter_name, data)
    task = StatsTask(store, store_subscription_set(store, subscriptions), {one.stream: one for one in ranges})
    counts: dict[str, dict[str, int]] = {}
    fields: list[dict[str, Any]] = []
    if ranges:
        entries = client.frame(spark, ranges).persist()
        try:
            counts = _sum_counts(entries.mapInArrow(partial(count_changes, task), COUNTS_DDL))
            fields = _field_statistics(entries.mapInArrow(partial(field_values, task.ranges), VALUES_DDL))
        finally:
            entries.unpersist()
    changes = sum(counts.get("changes", {}).values())
    probes = counts.get("bloom", {})
    probed = {"keys": len(keys), "absent": probes.get("absent", 0), "wrong": probes.get("wrong", 0)}
    stats = {
        "changes": changes,
        "subscriptions": len(subscriptions.subs),
        "partitions": _partition_skew(counts.get("changes", {})),
        "fields": fields,
        "candidatesPerChange": _share(counts.get("candidates", {}).get("", 0), changes),
        "predicates": _predicate_shares(counts.get("hits", {}), changes),
        "bloom": {
            "object": filter_name,
            "keys": len(keys),
            "bitsPerKey": BITS_PER_KEY,
            "hashes": HASHES,
            "falsePositives": _share(probed["wrong"], probed["absent"]),
        },
    }
    return stats, probed


def bloom_keys(subscriptions: SubscriptionSet) -> set[bytes]:
    """The values in equality conditions of the subscriptions."""
    found: set[bytes] = set()
    for summary in subscriptions.subs.values():
        for conditions in interest_from_summary(summary).predicate.branches:
            for condition in conditions:
                found |= {bloom_key(condition.path, value) for value in _searched_values(condition)}
    return found


def build_bloom(keys: set[bytes]) -> BloomFilter:
    """A deterministic filter of the keys."""
    bloom = BloomFilter(0.0)
    for key in sorted(keys):
        bloom.add(key)
    return bloom


def _searched_values(condition: Condition) -> list[Any]:
    if condition.kind == "equal":
        return [condition.value]
    return list(condition.value) if condition.kind == "among" else []


# -- kernels -----------------------------------------------------------------------------------------------


def count_changes(task: StatsTask, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: changes by partition, hits by predicate, candidates, and Bloom filter probes."""
    compiled = shared_compiled_set(task.store, task.index)
    subscriptions = compiled.subscriptions
    keys = bloom_keys(subscriptions)
    known = build_bloom(keys)
    paths = {tuple(orjson.loads(key)[0]) for key in keys}
    gets = [(path, field_getter(path)) for path in sorted(paths)]
    tally: dict[tuple[str, str, int], int] = {}

    def add(what: str, name: str = "", partition: int = 0, count: int = 1) -> None:
        tally[what, name, partition] = tally.get((what, name, partition), 0) + count

    before = sum(matcher.candidates for matcher in compiled.matchers.values())
    for batch in batches:
        for entry in decode_entries(batch, task.ranges):
            if entry.change is None:
                continue
            add("changes", str(entry.range.partition), entry.range.partition)
            matches = match_change(compiled.matchers.get(entry.range.collection), entry.change)
            for predicate in {subscriptions.subs[one.key].predicateHash for one in matches}:
                add("hits", predicate)
            image = entry.change.after or entry.change.before or {}
            for path, get in gets:
                value = get(image)
                key = None if value is MISSING else bloom_key(path, equality_class(value))
                if key is not None and key not in keys:
                    add("bloom", "absent")
                    if key in known:
                        add("bloom", "wrong")
    add("candidates", count=sum(matcher.candidates for matcher in compiled.matchers.values()) - before)
    rows = [
        {"what": what, "name": name, "partition": partition, "count": count}
        for (what, name, partition), count in tally.items()
    ]
    yield pa.RecordBatch.from_pylist(rows, schema=COUNTS_SCHEMA)


def field_values(ranges: dict[str, ChangeRange], batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: each field of each change with the hash of its value."""
    for batch in batches:
        rows: list[dict[str, Any]] = []
        for entry in decode_entries(batch, ranges):
            if entry.change is not None:
                image = entry.change.after or entry.change.before or {}
                rows += _iter_fields(
                    {k: v for k, v in image.items() if k not in RESERVED_FIELDS}, "", DEPTH_MAX
                )
        yield pa.RecordBatch.from_pylist(rows, schema=VALUES_SCHEMA)


def _iter_fields(image: dict[str, Any], prefix: str, depth: int) -> Iterator[dict[str, Any]]:
    for name, item in image.items():
        field, value = f"{prefix}{name}", cast("object", item)
        if isinstance(value, dict) and depth > 1:
            yield from _iter_fields(cast("dict[str, Any]", value), f"{field}.", depth - 1)
            continue
        kind = _KINDS.get(cast("type[Any]", type(item)), "map")
        digest = xxhash.xxh3_64_intdigest(orjson.dumps(item, option=orjson.OPT_SORT_KEYS))
        yield {"field": field, "kind": kind, "hash": digest - 2**63}


# -- native SQL --------------------------------------------------------------------------------------------


def _sum_counts(frame: Any) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for row in frame.groupBy("what", "name").sum("count").collect():
        found.setdefault(row["what"], {})[row["name"]] = row["sum(count)"]
    return found


def _field_statistics(values: Any) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    each = values.groupBy("field", "kind", "hash").count()
    found = (
        each.groupBy("field")
        .agg(
            f.sum("count").alias("count"),
            f.count("hash").alias("distinct"),
            f.max("count").alias("most"),
            f.sort_array(f.collect_set("kind")).alias("kinds"),
        )
        .orderBy(f.desc("count"), "field")
        .limit(FIELDS_MAX)
        .collect()
    )
    return [
        {
            "field": row["field"],
            "changes": row["count"],
            "distinct": row["distinct"],
            "commonest": _share(row["most"], row["count"]),
            "kinds": list(row["kinds"]),
        }
        for row in found
    ]


def _predicate_shares(hits: dict[str, int], changes: int) -> list[dict[str, Any]]:
    ordered = sorted(hits.items(), key=lambda one: (-one[1], one[0]))[:PREDICATES_MAX]
    return [{"predicateHash": name, "share": _share(count, changes)} for name, count in ordered]


def _partition_skew(changes: dict[str, int]) -> dict[str, Any]:
    """Changes by partition, and the ratio of the largest partition to the mean of nonempty ones."""
    counts = {int(name): count for name, count in changes.items()}
    mean = sum(counts.values()) / len(counts) if counts else 0.0
    return {
        "changes": {str(partition): counts[partition] for partition in sorted(counts)},
        "skew": round(max(counts.values()) / mean, 3) if counts else 1.0,
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
