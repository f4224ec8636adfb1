"""The matcher as a process of its own: subscriptions and changes in, matches and times out.

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
from typing import Any, BinaryIO

import msgspec

import tailrace
from tailrace.spark.live_queries.compiled import CompiledSubscriptions, decode_subscription_set, match_change
from tailrace.watch.document import decode_change
from tailrace.watch.matcher import Matcher
from tailrace.watch.predicate import SEMANTICS


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
