"""Dead letters: undeliverable and rejected messages, with the reason.

The cursor of a mailbox may pass an undelivered message only when its dead letter is durable: a crash in
between would lose the message. A crash after that is repaired at start-up (`HubRestore.letter`). Everything
that ends the same message meanwhile waits for the same letter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from tailrace.common.errors import TailraceError
from tailrace.hub import requests
from tailrace.hub.delivery_queues import (
    BROADCAST,
    Cursor,
    DeliveryQueue,
    Feed,
    cursor_key,
    decode_broadcast,
)
from tailrace.hub.effects import Append, AppendOutcome, Read, ReadResult
from tailrace.hub.envelope import new_id, parse_envelope
from tailrace.hub.errors import HubError
from tailrace.hub.mailboxes import PAGE_BYTES, STORED_BYTES_MAX
from tailrace.hub.requests import OutgoingMessage, outgoing_from_envelope

if TYPE_CHECKING:
    from tailrace.hub.session import Session
    from tailrace.hub.state import Hub


DEAD_LETTERS_STREAM: Final = "hub/dead-letters"
LETTERS_PER_SECOND_MAX: Final = 100  # of one identity; beyond, equal ones are merged
MERGED_MAX: Final = 10_000
WAITING_BYTES_MAX: Final = 2**30  # checked when it was accepted
REJECTED: Final = "rejected"


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
        hub = self._hub

        def count(now_ms: int) -> None:
            hub.count("dead_letters", reason)
            hub.trace.record("dead", copy, now_ms, stream=stream, offset=offset, reason=reason)

        def settled(outcome: AppendOutcome, now_ms: int) -> None:
            if outcome.error is None:
                count(now_ms)
            if then is not None:
                then(outcome, now_ms)

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
        if accepted_ms is not None:
            self._append(letter, settled)  # counted when it is durable: a failed one is written again
            return
        count(now_ms)
        if then is None and not self._within_rate(copy.sender.address, now_ms):
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


RETRIES_PER_TICK_MAX: Final = 1000

LetterCallback = Callable[[TailraceError | None, int], None]


def after_all(letters: int, then: LetterCallback) -> LetterCallback:
    """A callback for each of several letters; the last one, or the first with an error, calls `then`."""
    left = letters

    def one_done(error: TailraceError | None, now_ms: int) -> None:
        nonlocal left
        if left:
            left = left - 1 if error is None else 0
            if not left:
                then(error, now_ms)

    return one_done


class EntryDeadLetters:
    """Dead letters of stored messages: exactly one for each entry that a cursor passes undelivered.

    While its letter is being written, an entry is neither delivered nor dead-lettered again, and its cursor
    does not pass it.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        # Callbacks by cursor, then by entry. A cursor object belongs to one life of its stream.
        self._writing: dict[Cursor, dict[int, list[LetterCallback]]] = {}
        self._failed: deque[_EntryLetter] = deque()

    def entries(self, cursor: Cursor) -> Collection[int]:
        """The entries whose letters are being written."""
        return self._writing.get(cursor, ())

    def write(
        self,
        queue: DeliveryQueue,
        feed: Feed,
        entry: int,
        copy: OutgoingMessage,
        reason: str,
        attempts: int,
        time_ns: int,
        now_ms: int,
        *,
        then: LetterCallback | None = None,
    ) -> None:
        """Writes the letter of an entry, unless its cursor has passed it. Retries until it is durable.

        `then` gets the outcome of the present attempt.
        """
        if feed.cursor.has_passed(entry):
            if then is not None:
                then(None, now_ms)
        elif self._begin(feed.cursor, entry, then):
            self._append(_EntryLetter(queue.path, feed, entry, reason, attempts), copy, time_ns, now_ms)

    def reject(
        self, queue: DeliveryQueue, feed: Feed, entries: set[int], then: LetterCallback, now_ms: int
    ) -> None:
        """Writes the letters of entries that their reader rejected, or joins those being written.

        Calls `then` once, when all are durable or one cannot be written; then the rejection has failed.
        """
        if not entries:
            then(None, now_ms)
            return
        one_done = after_all(len(entries), then)
        for entry in sorted(entries):
            if self._begin(feed.cursor, entry, one_done):
                self._read(_EntryLetter(queue.path, feed, entry, REJECTED, feed.deliveries.get(entry, 1)))

    def tick(self) -> None:
        """Once a second: tries again to write failed letters."""
        for _ in range(min(len(self._failed), RETRIES_PER_TICK_MAX)):
            self._read(self._failed.popleft())

    def _begin(self, cursor: Cursor, entry: int, then: LetterCallback | None) -> bool:
        """Whether the letter is to be written: False if it is being written already."""
        writing = self._writing.setdefault(cursor, {})
        is_new = entry not in writing
        waiting = writing.setdefault(entry, [])
        if then is not None:
            waiting.append(then)
        return is_new

    def _read(self, letter: _EntryLetter) -> None:
        """Reads the whole message for its letter. A trimmed one has none."""
        feed = letter.feed

        def found(page: ReadResult, now_ms: int) -> None:
            if page.error is not None and page.error.code != "offset_gone":
                self._settled(letter, AppendOutcome(error=page.error), now_ms)
                return
            if not page.entries:
                self._settled(letter, AppendOutcome(), now_ms)
                return
            ((_, time_ns, body),) = page.entries
            copy = requests.outgoing_from_envelope(
                parse_envelope(_stored_message(feed, body), STORED_BYTES_MAX)
            )
            self._append(letter, copy, time_ns, now_ms)

        self._hub.effects.append(Read(feed.stream, letter.entry - 1, 1, PAGE_BYTES, found))

    def _append(self, letter: _EntryLetter, copy: OutgoingMessage, time_ns: int, now_ms: int) -> None:
        hub, stream, entry = self._hub, letter.feed.stream, letter.entry

        def then(outcome: AppendOutcome, now_ms: int) -> None:
            pending = hub.pending.stored_at(stream, entry, letter.path)
            if outcome.error is None and pending is not None:
                code = "message_expired" if letter.reason == "message_expired" else "timeout"
                error = HubError(code, f"not delivered: {letter.reason}", {"outcome": "unknown"})
                hub.pending.fail(pending, error, now_ms)
            self._settled(letter, outcome, now_ms)

        hub.dead_letters.write(
            letter.reason,
            copy,
            now_ms,
            stream=stream,
            offset=hub.streams.offset(stream, entry),
            cursor=cursor_key(letter.path, stream),
            attempts=letter.attempts,
            accepted_ms=time_ns // 1_000_000,
            then=then,
        )

    def _settled(self, letter: _EntryLetter, outcome: AppendOutcome, now_ms: int) -> None:
        """The letter is durable, or could not be written: then a rejected message stays with its reader."""
        cursor, entry = letter.feed.cursor, letter.entry
        writing = self._writing[cursor]
        waiting = writing.pop(entry)
        if outcome.error is not None and letter.reason != REJECTED:
            writing[entry] = []
            self._failed.append(letter)
        if not writing:
            del self._writing[cursor]
        mailboxes = self._hub.mailboxes
        if outcome.error is None:
            mailboxes.pass_entry(letter.path, letter.feed, entry)
        elif letter.reason == REJECTED:
            mailboxes.requeue_entry(letter.path, letter.feed, entry)
        for each in waiting:
            each(outcome.error, now_ms)
        mailboxes.resume_delivery(letter.path, now_ms)


class _EntryLetter(NamedTuple):
    """The letter of one entry, without the message."""

    path: str  # of the queue
    feed: Feed
    entry: int
    reason: str
    attempts: int


def _stored_message(feed: Feed, body: bytes) -> bytes:
    return bytes(decode_broadcast(body).message) if feed.kind == BROADCAST else body
