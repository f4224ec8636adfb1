"""`tailrace pipeline shadow`: do two versions of the matcher say the same, and as fast?

Nothing is written to delivery streams.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from tailrace.spark.live_queries.capture import captured_frame, load_capture
from tailrace.spark.live_queries.report import LatencyHistogram, ShadowVerdict, SidePair
from tailrace.spark.live_queries.sides import (
    COMPARISON_DDL,
    SIDES,
    ShadowTask,
    bucket_midpoint_us,
    compare_changes,
)
from tailrace.spark.live_queries.subscription_sets import read_subscription_set
from tailrace.spark.live_queries.versions import load_archive, put_archive
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.sink_options import store_url

EXAMPLES_MAX: Final = 100


class ShadowOptions(NamedTuple):
    """What is compared: a capture, or a range of a collection."""

    baseline: str
    candidate: str
    capture: str | None = None
    database: str = ""
    collection: str = ""
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    store: str | None = None
    max_divergence: float = 0.0
    max_latency_ratio: float = 1.2


def run_shadow(spark: Any, place: WatchClient | None, options: ShadowOptions) -> ShadowVerdict:
    archives = [load_archive(given) for given in (options.baseline, options.candidate)]
    if options.capture is not None:
        capture, subscriptions = load_capture(options.capture)
        store = options.store or store_url(options.capture)
        frame = captured_frame(spark, options.capture, capture) if capture.parts else None
    else:
        assert place is not None, "a range of changes is read from a server"
        store = options.store or place.store()
        place.check_matchable(options.database, options.collection)
        announced = place.announce(options.database)
        try:
            subscriptions = read_subscription_set(
                place.server, announced.stream, announced.offset, options.database, [options.collection]
            )
        finally:
            place.announce(options.database, 0)
        ranges = place.ranges(options.database, options.collection, options.start, options.end)
        frame = _range_frame(spark, place, ranges)
    names = [put_archive(store, data) for data in archives]
    task = ShadowTask(store, (names[0], names[1]), subscriptions.encode())
    if frame is None:
        return ShadowVerdict(options.baseline, options.candidate, subscriptions=len(subscriptions.subs))
    compared = frame.mapInArrow(partial(compare_changes, task), COMPARISON_DDL)
    return _judge(compared, options, len(subscriptions.subs))


def _range_frame(spark: Any, place: WatchClient, ranges: list[ChangeRange]) -> Any:
    return place.frame(spark, ranges) if ranges else None


def _judge(compared: Any, options: ShadowOptions, subscriptions: int) -> ShadowVerdict:
    from pyspark.sql import functions as f

    # Everything is asked for twice, and matching is the dear part.
    compared = compared.persist()
    try:
        missing = f.when(f.col("baseline").isNotNull() & f.col("candidate").isNull(), "missing")
        outcome = missing.when(f.col("baseline").isNull(), "extra").otherwise("opDiffers")
        kind = f.when(f.col("kind") == "differs", outcome).otherwise(f.col("kind"))
        totals = (
            compared.groupBy(kind.alias("what"), "side", "bucket")
            .agg(f.sum("count").alias("count"))
            .collect()
        )
        examples = (
            compared.where("kind = 'differs'")
            .select("partition", "seq", "subscription", "baseline", "candidate")
            .orderBy("partition", "seq", "subscription")
            .limit(EXAMPLES_MAX)
            .collect()
        )
    finally:
        compared.unpersist()
    counts: dict[str, int] = {}
    matches: dict[str, int] = dict.fromkeys(SIDES, 0)
    times: dict[str, LatencyHistogram] = {side: {} for side in SIDES}
    for row in totals:
        if row["what"] == "matches":
            matches[row["side"]] = row["count"]
        elif row["what"] == "latency":
            times[row["side"]][row["bucket"]] = row["count"]
        else:
            counts[row["what"]] = row["count"]
    verdict = ShadowVerdict(
        options.baseline,
        options.candidate,
        changes=counts.get("changes", 0),
        subscriptions=subscriptions,
        matches=SidePair(**matches),
        missing=counts.get("missing", 0),
        extra=counts.get("extra", 0),
        opDiffers=counts.get("opDiffers", 0),
        p50=SidePair(*(quantile(times[side], 0.50) for side in SIDES)),
        p99=SidePair(*(quantile(times[side], 0.99) for side in SIDES)),
        examples=[row.asDict() for row in examples],
        times=times,
    )
    passed = (
        verdict.divergence <= options.max_divergence and verdict.latencyRatio <= options.max_latency_ratio
    )
    return msgspec.structs.replace(verdict, verdict="pass" if passed else "fail")


def quantile(times: LatencyHistogram, share: float) -> float:
    """Microseconds below which this share of the changes was matched, to about 5 %."""
    left = share * sum(times.values())
    for bucket, count in sorted(times.items()):
        left -= count
        if left <= 0:
            return round(bucket_midpoint_us(bucket), 2)
    return 0.0
