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
from tailrace.spark.blobs import blobs
from tailrace.spark.failpoints import reached
from tailrace.spark.live_queries.kernels import DELIVERED_DDL, MatchTask, match_changes
from tailrace.spark.live_queries.subscription_sets import put_set, read_set
from tailrace.spark.live_queries.watch_client import Bound, ChangeRange, Place
from tailrace.spark.sink_options import store_url
from tailrace.storage.object_store.interface import ObjectMissingError

CHOICE: Final = "match.json"


class MatchOptions(NamedTuple):
    database: str
    collections: str = "**"
    start: Bound = Bound("earliest")
    end: Bound = Bound("latest")
    store: str | None = None
    checkpoint: str | None = None


class Choice(msgspec.Struct, frozen=True):
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


def run_match(spark: Any, place: Place, options: MatchOptions) -> MatchReport:
    """Matches the range and writes deliveries."""
    announced = place.announce(options.database)
    try:
        store = options.store or place.store()
        choice = _chosen(place, options, store, announced)
        reached("after_checkpoint", "driver")
        if choice.ranges:
            _write(spark, place, options, store, choice, announced.token)
        reached("after_publish", "driver")
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


def _chosen(place: Place, options: MatchOptions, store: str, announced: Any) -> Choice:
    kept = None if options.checkpoint is None else blobs(store_url(options.checkpoint))
    if kept is not None:
        try:
            return msgspec.json.decode(kept.get(CHOICE), type=Choice)
        except ObjectMissingError:
            pass
    names = place.matchable(options.database, options.collections)
    ranges = [
        one for name in names for one in place.ranges(options.database, name, options.start, options.end)
    ]
    subscriptions = read_set(place.server, announced.stream, announced.offset, options.database, names)
    index = put_set(store, subscriptions)
    as_of = offsets.parse_offset(announced.offset)[1]
    count = len(subscriptions.subs)
    choice = Choice(index, count, announced.gateway, announced.deliveries, ranges, as_of)
    if kept is not None and not kept.create(CHOICE, msgspec.json.encode(choice)):
        return msgspec.json.decode(kept.get(CHOICE), type=Choice)  # somebody was faster
    return choice


def _write(
    spark: Any, place: Place, options: MatchOptions, store: str, choice: Choice, token: str | None
) -> None:
    ranges = {one.stream: one for one in choice.ranges}
    task = MatchTask(store, choice.index, choice.target, choice.owner, ranges, choice.as_of)
    found = place.frame(spark, choice.ranges).mapInArrow(partial(match_changes, task), DELIVERED_DDL)
    given = {name: value for name, value in place.given.items() if name in CONNECTING}
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


CONNECTING: Final = frozenset(
    ("endpoint", "token", "tokenFile", "tls.caFile", "requestTimeout", "fetchBytes", "retries")
)
