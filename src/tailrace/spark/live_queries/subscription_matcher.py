"""Subscriptions compiled into matchers, in this process or as a process of its own.

Subscriptions as matchers. Nothing here needs Spark, a server or a store.

The matcher as a process of its own: subscriptions and changes in, matches and times out.

What goes through the two pipes is the same in every version, so that a driver of one version can run the
matcher of another. Frames are a length of four bytes and as many bytes.

    first in    a set of subscriptions, as JSON
    first out   `{"version", "semantics", "path"}`, as JSON
    then in     MessagePack: a list of [partition, number, time in ns, entry]
    then out    MessagePack: for each of them [ns, [[key, op, reason], ...]]
"""

from __future__ import annotations

import sys
import time
from typing import Any, BinaryIO, Final

import msgspec

import tailrace
from tailrace.watch.document import Change, decode_change
from tailrace.watch.external_matching import DeliveredMatch, SubscriptionSummary, interest_from_summary
from tailrace.watch.matcher import Matcher
from tailrace.watch.predicate import SEMANTICS

SCAN_MAX: Final = 1 << 30  # the gateway has refused what is too much for it


class MatcherMismatchError(RuntimeError):
    """The subscriptions mean something else here than on the server: the versions differ."""


class SubscriptionSet(msgspec.Struct, frozen=True):
    """Subscriptions by key: `<connection>/<subscription>`."""

    subs: dict[str, SubscriptionSummary]
    v: int = 1

    def encode(self) -> bytes:
        """The same for the same subscriptions, wherever they have got to meanwhile."""
        settled = {
            key: msgspec.structs.replace(self.subs[key], position=[], expires=0) for key in sorted(self.subs)
        }
        return msgspec.json.encode(SubscriptionSet(settled))


def decode_subscription_set(data: bytes) -> SubscriptionSet:
    return msgspec.json.decode(data, type=SubscriptionSet)


class CompiledSubscriptions:
    """A set as matchers, one for each collection."""

    def __init__(self, subscriptions: SubscriptionSet, *, strict: bool = True) -> None:
        self.subscriptions = subscriptions
        self.matchers: dict[str, Matcher[str]] = {}
        for key, summary in subscriptions.subs.items():
            interest = interest_from_summary(summary)
            if strict and interest.predicate.hash.hex() != summary.predicateHash:
                raise MatcherMismatchError(
                    "a subscription means something else here than on the server; "
                    "driver, executors and server need the same version of this package"
                )
            matcher = self.matchers.get(summary.collection)
            if matcher is None:
                matcher = self.matchers[summary.collection] = Matcher(SCAN_MAX)
            matcher.add(interest, key)

    def close(self) -> None:
        """Nothing to let go of."""


def match_change(matcher: Matcher[str] | None, change: Change) -> list[DeliveredMatch]:
    """What a change is to whom, in the order of their keys."""
    if matcher is None:
        return []
    found = matcher.match(change)
    told = [
        DeliveredMatch(key, op, reason) for subscribers, op, reason in found.matches for key in subscribers
    ]
    told += [DeliveredMatch(key, "resync", "cost-exceeded") for key in found.too_costly]
    return sorted(told, key=lambda one: one.key)


def read_frame(stream: BinaryIO) -> bytes | None:
    """None where the other side has ended."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def main() -> None:
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(given)
    if first is None:
        return
    # Another version may have had other hashes: what they decide is what counts here.
    matchers = CompiledSubscriptions(decode_subscription_set(first), strict=False).matchers
    about = {"version": tailrace.__version__, "semantics": SEMANTICS, "path": str(tailrace.__file__)}
    write_frame(answers, msgspec.json.encode(about))
    while (frame := read_frame(given)) is not None:
        rows: list[tuple[int, int, int, bytes]] = msgspec.msgpack.decode(frame)
        write_frame(answers, msgspec.msgpack.encode([_match_timed(matchers, *row) for row in rows]))


def _match_timed(
    matchers: dict[str, Matcher[str]], partition: int, seq: int, time_ns: int, value: bytes
) -> tuple[int, list[Any]]:
    began = time.perf_counter_ns()
    change = decode_change(value, partition, seq, time_ns)
    told = [] if change is None else match_change(matchers.get(change.entry.collection), change)
    return time.perf_counter_ns() - began, [(one.key, one.op, one.reason) for one in told]


if __name__ == "__main__":
    main()
