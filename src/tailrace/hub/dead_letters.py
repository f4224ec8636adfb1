"""Dead letters: undeliverable and rejected messages, with the reason.

The cursor of a mailbox may pass a rejected message only when its dead letter is durable: a crash in between
would lose the message. Concurrent rejections of one message wait for the same letter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from tailrace.common.errors import TailraceError
from tailrace.hub import requests
from tailrace.hub.delivery_queues import BROADCAST, DeliveryQueue, Feed, decode_broadcast
from tailrace.hub.effects import Append, AppendOutcome, Read, ReadResult
from tailrace.hub.envelope import new_id, parse_envelope
from tailrace.hub.mailboxes import PAGE_BYTES, STORED_BYTES_MAX
from tailrace.hub.requests import OutgoingMessage, outgoing_from_envelope

if TYPE_CHECKING:
    from tailrace.hub.session import Session
    from tailrace.hub.state import Hub


DEAD_LETTERS_STREAM: Final = "hub/dead-letters"
LETTERS_PER_SECOND_MAX: Final = 100  # of one identity; beyond, equal ones are merged
MERGED_MAX: Final = 10_000
WAITING_BYTES_MAX: Final = 2**30  # checked when it was accepted


class DeadLetter(msgspec.Struct, rename="camel"):
    """One entry of hub/dead-letters."""

    id: str
    reason: str
    sender: str = msgspec.field(name="from")
    to: str
    message: Raw
    stream: str | None
    offset: str | None
    attempts: int
    count: int
    accepted_at: int | None
    failed_at: int
    trace_id: Any = None
    cursor: str | None = None  # of an accepted message: whose position is behind it


class DeadLetters:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._seconds: dict[str, list[int]] = {}  # by identity: [second, letters]
        self._merged: dict[tuple[str, str, str], DeadLetter] = {}

    def write(
        self,
        reason: str,
        copy: OutgoingMessage,
        now_ms: int,
        *,
        stream: str | None = None,
        offset: str | None = None,
        cursor: str | None = None,
        attempts: int = 0,
        accepted_ms: int | None = None,
        trace: Any = None,
        then: Callable[[AppendOutcome, int], None] | None = None,
    ) -> None:
        """Accepted messages are never merged; others are merged above the rate limit."""
        self._hub.count("dead_letters", reason)
        self._hub.trace.record("dead", copy, now_ms, stream=stream, offset=offset, reason=reason)
        letter = DeadLetter(
            f"dl-{new_id(now_ms)}",
            reason,
            copy.sender.address,
            copy.to,
            Raw(copy.frame()),
            stream,
            offset,
            attempts,
            1,
            accepted_ms,
            now_ms,
            trace,
            cursor,
        )
        if accepted_ms is None and then is None and not self._within_rate(copy.sender.address, now_ms):
            key = (reason, copy.sender.address, copy.to)
            known = self._merged.get(key)
            if known is not None:
                known.count += 1
                known.failed_at = now_ms
                return
            if len(self._merged) < MERGED_MAX:
                self._merged[key] = letter
                return
        self._append(letter, then)

    def _within_rate(self, sender: str, now_ms: int) -> bool:
        second = now_ms // 1000
        noted = self._seconds.get(sender)
        if noted is None or noted[0] != second:
            if len(self._seconds) > MERGED_MAX:
                self._seconds.clear()
            self._seconds[sender] = [second, 1]
            return True
        noted[1] += 1
        return noted[1] <= LETTERS_PER_SECOND_MAX

    def _append(self, letter: DeadLetter, then: Callable[[AppendOutcome, int], None] | None = None) -> None:
        self._hub.append(
            Append(DEAD_LETTERS_STREAM, msgspec.json.encode(letter), then, key=letter.to.encode())
        )

    def session_ended(self, session: Session, now_ms: int) -> None:
        """Dead-letters the resume buffer of a client that did not reconnect."""
        waiting, session.resume_buffer = session.resume_buffer, None
        for frame in waiting or ():
            copy = outgoing_from_envelope(parse_envelope(frame, WAITING_BYTES_MAX))
            if copy.sender.address != self._hub.options.address:
                self.write("resume_expired", copy, now_ms)
        session.detached_bytes = 0

    def flush(self) -> None:
        """Writes the merged letters, once a second."""
        for letter in self._merged.values():
            self._append(letter)
        self._merged.clear()


RejectedCallback = Callable[[TailraceError | None, int], None]


class RejectedMessages:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._waiting: dict[tuple[str, str, int], list[RejectedCallback]] = {}  # by owner, stream and entry

    def dead_letter(
        self, queue: DeliveryQueue, feed: Feed, entries: set[int], then: RejectedCallback, now_ms: int
    ) -> None:
        """Calls `then` once, when all letters are durable or one cannot be written."""
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
            self._join(queue, feed, entry, lambda error, now, entry=entry: one_done(entry, error, now))

    def _join(self, queue: DeliveryQueue, feed: Feed, entry: int, done: RejectedCallback) -> None:
        key = (queue.path, feed.stream, entry)
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
            """Reads the whole message for its letter. A trimmed one has none."""
            if page.error is not None and page.error.code != "offset_gone":
                settled(AppendOutcome(error=page.error), now_ms)
                return
            if not page.entries:
                settled(AppendOutcome(), now_ms)
                return
            ((number, time_ns, body),) = page.entries
            copy = requests.outgoing_from_envelope(
                parse_envelope(_stored_message(feed, body), STORED_BYTES_MAX)
            )
            self._hub.mailboxes.dead_letter(
                queue, feed, number, copy, "rejected", attempts, time_ns, now_ms, then=settled
            )

        self._hub.effects.append(Read(feed.stream, entry - 1, 1, PAGE_BYTES, found))


def _stored_message(feed: Feed, body: bytes) -> bytes:
    return bytes(decode_broadcast(body).message) if feed.kind == BROADCAST else body
