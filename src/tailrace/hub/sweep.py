"""Sweep of hub streams: expired mailbox messages, unused mailboxes, old entries of topics and broadcasts.

Streams are swept in name order, a few per second, so the cost per second does not depend on their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tailrace.hub import requests
from tailrace.hub.addresses import MAILBOX_PREFIX, TOPIC_PREFIX
from tailrace.hub.dead_letters import after_all
from tailrace.hub.delivery_queues import BROADCAST_STREAM, Cursor
from tailrace.hub.effects import DeleteStream, ListStreams, Read, ReadResult, StreamSummary
from tailrace.hub.envelope import parse_envelope
from tailrace.hub.mailboxes import PAGE_BYTES, PAGE_ENTRIES, STORED_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.common.errors import TailraceError
    from tailrace.hub.state import Hub

PREFIXES: Final = (MAILBOX_PREFIX, TOPIC_PREFIX, BROADCAST_STREAM.rpartition("/")[0] + "/")
NAMES_AT_ONCE: Final = 100
REMEMBERED_MAX: Final = 100_000
NO_READERS: Final = 2**62


class TrimBounds(NamedTuple):
    """Entries up to `upto` may be trimmed by age, or above a size."""

    age_ms: int
    bytes_max: int | None
    upto: int


class HubSweep:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._prefix = 0
        self._after = ""
        self._next_ms = 0
        self._listing = False
        # By mailbox: its committed position, and when the next entry expires.
        self._due: dict[str, tuple[int, int]] = {}
        self.bounds: dict[str, TrimBounds] = {}  # of streams that may be trimmed

    def tick(self, now_ms: int) -> None:
        """Once a second: sweeps the next streams, unless the round is finished."""
        if self._listing or now_ms < self._next_ms:
            return
        self._listing = True
        prefix = PREFIXES[self._prefix]
        self._hub.effects.append(ListStreams(prefix, self._after, NAMES_AT_ONCE, self._found))

    def _found(self, names: list[StreamSummary], now_ms: int) -> None:
        self._listing = False
        sweep = self._sweep_mailbox if PREFIXES[self._prefix] == MAILBOX_PREFIX else self._sweep_shared
        for named in names:
            sweep(named, now_ms)
        if len(names) == NAMES_AT_ONCE:
            self._after = names[-1].stream
            return
        self._after = ""
        self._prefix = (self._prefix + 1) % len(PREFIXES)
        if self._prefix == 0:
            self._hub.topics.rewrite_old(now_ms)
            self._next_ms = now_ms + self._hub.limits.hub_sweep_ms

    # -- mailboxes -------------------------------------------------------------------------------------

    def _sweep_mailbox(self, named: StreamSummary, now_ms: int) -> None:
        hub, limits = self._hub, self._hub.limits
        path = named.stream.removeprefix(MAILBOX_PREFIX)
        cursor = hub.mailboxes.cursors.get(path, named.stream)
        committed = named.earliest if cursor is None else max(named.earliest, cursor.committed)
        age_ms = now_ms - named.created_ms
        if committed > named.earliest and age_ms >= limits.hub_mailbox_kept_ms:
            self.bounds[named.stream] = TrimBounds(limits.hub_mailbox_kept_ms, None, committed)
        queue = hub.mailboxes.queues.get(path)
        if queue is not None and (queue.appends or queue.is_pushed):
            return  # its owner reads it; delivery expires old entries
        if committed < named.tail:
            if age_ms >= limits.hub_mailbox_ms:
                self._expire(path, named.stream, committed, now_ms)
        elif queue is None and path not in hub.registry.by_path and self._is_unused(named, cursor, now_ms):
            hub.effects.append(DeleteStream(named.stream))
            hub.mailboxes.cursors.delete(path, named.stream)
            hub.mailboxes.cursors.delete(path, BROADCAST_STREAM)

    def _is_unused(self, named: StreamSummary, cursor: Cursor | None, now_ms: int) -> bool:
        used_ms = max(named.created_ms, named.last_ms, 0 if cursor is None else cursor.moved_ms)
        # Entries since the listing count as use.
        same = self._hub.streams.tail(named.stream) == named.tail
        return same and now_ms - used_ms >= self._hub.limits.hub_mailbox_unused_ms

    def _expire(self, path: str, stream: str, committed: int, now_ms: int) -> None:
        """Dead-letters expired messages, page by page."""
        known = self._due.get(stream)
        if known is not None and known[0] == committed and now_ms < known[1]:
            return

        def then(found: ReadResult, now_ms: int) -> None:
            if found.error is None:
                self._dead_letter_expired(path, stream, committed, found, now_ms)

        self._hub.effects.append(Read(stream, committed, PAGE_ENTRIES, PAGE_BYTES, then))

    def _dead_letter_expired(
        self, path: str, stream: str, committed: int, found: ReadResult, now_ms: int
    ) -> None:
        mailboxes, streams = self._hub.mailboxes, self._hub.streams
        queue = mailboxes.open(path)
        feed = queue.feeds[stream]
        same = committed == max(streams.earliest(stream), feed.cursor.committed)
        if not same or queue.is_pushed:
            mailboxes.release(queue)
            return  # its owner is back
        waits_ms = self._hub.limits.hub_mailbox_ms
        old = [entry for entry in found.entries if now_ms - entry[1] // 1_000_000 >= waits_ms]
        if len(old) < len(found.entries):
            number, time_ns, _ = found.entries[len(old)]
            self._remember(stream, number - 1, time_ns // 1_000_000 + waits_ms)
        if old:
            last = old[-1][0]

            def written(error: TailraceError | None, now_ms: int) -> None:
                if error is None:
                    feed.cursor.commit_upto(last)
                    mailboxes.cursors.mark_dirty(path, stream)
                    if len(old) == len(found.entries) and last < (streams.tail(stream) or 0):
                        self._expire(path, stream, feed.cursor.committed, now_ms)

            one_done = after_all(len(old), written)
            for number, time_ns, body in old:
                copy = requests.outgoing_from_envelope(parse_envelope(body, STORED_BYTES_MAX))
                self._hub.entry_dead_letters.write(
                    queue, feed, number, copy, "mailbox_expired", 0, time_ns, now_ms, then=one_done
                )
        mailboxes.release(queue)

    def _remember(self, stream: str, committed: int, due_ms: int) -> None:
        if len(self._due) >= REMEMBERED_MAX:
            self._due.clear()
        self._due[stream] = (committed, due_ms)

    # -- topics and broadcasts -------------------------------------------------------------------------

    def _sweep_shared(self, named: StreamSummary, now_ms: int) -> None:
        """Unread entries of durable subscribers are not trimmed, unless their cursor is too old."""
        limits = self._hub.limits
        old = now_ms - named.created_ms >= limits.hub_topic_ms
        if named.earliest == named.tail or not (old or named.size_bytes > limits.hub_topic_bytes):
            return
        if named.stream.startswith(TOPIC_PREFIX):
            upto = self._needed_by(self._subscribers(named), now_ms)
        else:
            upto = self._needed_by(self._hub.mailboxes.cursors.holders(named.stream), now_ms)
        upto = min(upto, named.tail)
        if upto > named.earliest:
            self.bounds[named.stream] = TrimBounds(limits.hub_topic_ms, limits.hub_topic_bytes, upto)

    def _subscribers(self, named: StreamSummary) -> Iterable[Cursor]:
        """A subscriber without a cursor starts at the beginning."""
        hub = self._hub
        for found in hub.topics.durable.match(named.stream.removeprefix(TOPIC_PREFIX)):
            cursor = hub.mailboxes.cursors.get(found.owner, named.stream)
            yield _cursor_at_start(named) if cursor is None else cursor

    def _needed_by(self, cursors: Iterable[Cursor], now_ms: int) -> int:
        oldest_ms = now_ms - self._hub.limits.hub_cursor_ms
        positions = [cursor.committed for cursor in cursors if cursor.moved_ms >= oldest_ms]
        return min(positions, default=NO_READERS)


def _cursor_at_start(named: StreamSummary) -> Cursor:
    return Cursor(named.earliest, named.earliest, moved_ms=named.created_ms)
