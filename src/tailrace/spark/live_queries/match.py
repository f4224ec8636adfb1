"""`tailrace pipeline match`: who would have been told what, over a bounded range of the log.

The choice of subscriptions and ranges is made once. With a checkpoint it is kept there, so that a job that
was killed and is run again does the same; the sink sees to it that nothing is appended twice.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from tailrace.protocol import offsets
from tailrace.spark.blobs import shared_object_store
from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.live_queries.kernels import DELIVERY_DDL, MatchTask, match_changes
from tailrace.spark.live_queries.subscription_sets import read_subscription_set, store_subscription_set
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.sink_options import store_url
from tailrace.storage.object_store.interface import ObjectMissingError

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
