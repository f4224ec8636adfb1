"""Rejected messages on their way to the dead letters.

A position may pass a message only when its letter is durable, or a crash in between would lose it without a
trace. Whoever rejects waits for the letter; whoever rejects it meanwhile waits for the same letter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.hub import copies
from tailrace.hub.boxes import BROADCAST, DeliveryQueue, Feed, decode_broadcast
from tailrace.hub.effects import AppendOutcome, Read, ReadResult
from tailrace.hub.mailboxes import PAGE_BYTES, STORED_BYTES_MAX
from tailrace.hub.message import parse_envelope

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

RejectedCallback = Callable[[TailraceError | None, int], None]


class RejectedMessages:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._waiting: dict[tuple[str, str, int], list[RejectedCallback]] = {}  # by owner, stream and entry

    def bury(
        self, box: DeliveryQueue, feed: Feed, entries: set[int], then: RejectedCallback, now_ms: int
    ) -> None:
        """`then` is told once, when all letters are durable or one cannot be written."""
        left = set(entries)
        if not left:
            then(None, now_ms)
            return

        def one_done(entry: int, error: TailraceError | None, now_ms: int) -> None:
            if entry not in left:
                return
            left.discard(entry)
            if error is not None:
                left.clear()
            if not left:
                then(error, now_ms)

        for entry in sorted(entries):
            self._join(box, feed, entry, lambda error, now, entry=entry: one_done(entry, error, now))

    def _join(self, box: DeliveryQueue, feed: Feed, entry: int, done: RejectedCallback) -> None:
        key = (box.path, feed.stream, entry)
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(done)
            return
        self._waiting[key] = [done]
        attempts = feed.deliveries.get(entry, 1)

        def settled(result: AppendOutcome, now_ms: int) -> None:
            for each in self._waiting.pop(key):
                each(result.error, now_ms)

        def found(page: ReadResult, now_ms: int) -> None:
            """The whole message goes into the letter, so it has to be read. One that was trimmed is gone."""
            if page.error is not None and page.error.code != "offset_gone":
                settled(AppendOutcome(error=page.error), now_ms)
                return
            if not page.entries:
                settled(AppendOutcome(), now_ms)
                return
            ((number, time_ns, body),) = page.entries
            copy = copies.outgoing_from_envelope(
                parse_envelope(_stored_message(feed, body), STORED_BYTES_MAX)
            )
            self._hub.mailboxes.bury(
                box, feed, number, copy, "rejected", attempts, time_ns, now_ms, then=settled
            )

        self._hub.effects.append(Read(feed.stream, entry - 1, 1, PAGE_BYTES, found))


def _stored_message(feed: Feed, body: bytes) -> bytes:
    return bytes(decode_broadcast(body).message) if feed.kind == BROADCAST else body
