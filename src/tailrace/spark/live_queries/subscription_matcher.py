"""Subscriptions compiled into matchers, in this process or in a separate process.

Needs no Spark and no server.

Run as a module it is the matcher process of shadow validation: subscriptions and changes on standard input,
matches and times on standard output. The protocol is the same in every version, so that the driver of one
version can run the matcher of another. A frame is a big-endian length of four bytes and the body.

    first in    a subscription set, as JSON
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

SCAN_MAX: Final = 1 << 30  # no limit here: the gateway has accepted these subscriptions


class MatcherMismatchError(RuntimeError):
    """Predicates have other hashes here than on the server: the versions differ."""


class SubscriptionSet(msgspec.Struct, frozen=True):
    """Subscriptions by key: `<connection>/<subscription>`."""

    subs: dict[str, SubscriptionSummary]
    v: int = 1

    def encode(self) -> bytes:
        """Deterministic for equal subscriptions: positions and expiry times are left out."""
        normalized = {
            key: msgspec.structs.replace(self.subs[key], position=[], expires=0) for key in sorted(self.subs)
        }
        return msgspec.json.encode(SubscriptionSet(normalized))


def decode_subscription_set(data: bytes) -> SubscriptionSet:
    return msgspec.json.decode(data, type=SubscriptionSet)


class CompiledSubscriptions:
    """The matchers of a set, one per collection."""

    def __init__(self, subscriptions: SubscriptionSet, *, strict: bool = True) -> None:
        self.subscriptions = subscriptions
        self.matchers: dict[str, Matcher[str]] = {}
        for key, summary in subscriptions.subs.items():
            interest = interest_from_summary(summary)
            if strict and interest.predicate.hash.hex() != summary.predicateHash:
                raise MatcherMismatchError(
                    "predicate hash of a subscription differs from the server's; "
                    "install the same version of tailrace on driver, executors and server"
                )
            matcher = self.matchers.get(summary.collection)
            if matcher is None:
                matcher = self.matchers[summary.collection] = Matcher(SCAN_MAX)
            matcher.add(interest, key)

    def close(self) -> None:
        """Nothing to release; required by ProcessCache."""


def match_change(matcher: Matcher[str] | None, change: Change) -> list[DeliveredMatch]:
    """The matches of a change, sorted by subscription key."""
    if matcher is None:
        return []
    found = matcher.match(change)
    matches = [
        DeliveredMatch(key, op, reason) for subscribers, op, reason in found.matches for key in subscribers
    ]
    matches += [DeliveredMatch(key, "resync", "cost-exceeded") for key in found.too_costly]
    return sorted(matches, key=lambda one: one.key)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame; None at the end of the stream."""
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
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(requests)
    if first is None:
        return
    # Not strict: the hashes of another version may differ, and only the matches are compared.
    matchers = CompiledSubscriptions(decode_subscription_set(first), strict=False).matchers
    about = {"version": tailrace.__version__, "semantics": SEMANTICS, "path": str(tailrace.__file__)}
    write_frame(responses, msgspec.json.encode(about))
    while (frame := read_frame(requests)) is not None:
        rows: list[tuple[int, int, int, bytes]] = msgspec.msgpack.decode(frame)
        write_frame(responses, msgspec.msgpack.encode([_match_timed(matchers, *row) for row in rows]))


def _match_timed(
    matchers: dict[str, Matcher[str]], partition: int, seq: int, time_ns: int, value: bytes
) -> tuple[int, list[Any]]:
    start_ns = time.perf_counter_ns()
    change = decode_change(value, partition, seq, time_ns)
    matches = [] if change is None else match_change(matchers.get(change.entry.collection), change)
    return time.perf_counter_ns() - start_ns, [(one.key, one.op, one.reason) for one in matches]


if __name__ == "__main__":
    main()
