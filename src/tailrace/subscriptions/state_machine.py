"""The state machine of a subscription: pure decisions without clock, I/O or randomness.

Each function looks at a `Subscription` and returns a `Step`: the changes to make durable and then to apply,
and whether a wake has to be sent after that. Nothing is changed here, so a step that cannot be saved has no
effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from tailrace.common.backoff import backoff_delay
from tailrace.common.errors import TailraceError
from tailrace.subscriptions.model import (
    BEFORE_FIRST,
    Change,
    DropLink,
    SetHead,
    SetLink,
    StreamLink,
    Subscription,
    SubscriptionHead,
    Wake,
)

RETRY_MS_FIRST: Final = 1000
RETRY_MS_MAX: Final = 60_000
RETRY_JITTER: Final = 0.2
RETRY_DELAY_MS_MAX: Final = round(RETRY_MS_MAX * (1 + RETRY_JITTER))
# Streams in one wake. Further pending streams follow in the next wake.
WAKE_STREAMS_MAX: Final = 1000
# With more links than this, a wake lists only those with pending entries.
LISTED_STREAMS_MAX: Final = 1000


class Step(msgspec.Struct, frozen=True):
    """A decision: the changes to make durable, and the wake to send after that."""

    changes: tuple[Change, ...] = ()
    wake: Wake | None = None


class StreamAck(msgspec.Struct, frozen=True):
    stream: str
    offset: str  # in canonical form; empty if it was malformed


class WakeAnswer(msgspec.Struct, frozen=True):
    """A callback, ack or release: the wake it refers to, by its token and by its body."""

    token_generation: int
    generation: int
    wake_id: str
    acks: Sequence[StreamAck] = ()
    done: bool = False


# -- configuration and links ------------------------------------------------------------------------------


def create(sub: Subscription, existing: Iterable[tuple[str, str | None]]) -> Step:
    """A new subscription over existing streams, from their tails: nothing is replayed.

    `existing` are the named streams (None for those that do not exist yet) and all that match. The generation
    continues that of a deleted subscription with the same id, so that its tokens stay fenced. The head is
    saved last: without it the subscription does not exist.
    """
    named = set(sub.config.streams)
    changes: list[Change] = []
    for path, tail in existing:
        glob = tail is not None and sub.wants(path)
        if path != sub.config.wake_stream and (glob or path in named):
            changes.append(SetLink(path, StreamLink(tail or BEFORE_FIRST, path in named, glob)))
    return Step((*changes, SetHead(sub.head)))


def confirm(sub: Subscription, base_url: str) -> Step:
    """The same configuration again. Callbacks use the URL by which the client now reaches the server."""
    if base_url == sub.head.base_url:
        return Step()
    return Step((SetHead(replace(sub.head, base_url=base_url)),))


def delete(sub: Subscription, now_ms: int) -> Step:
    """Store a tombstone with the generation, then remove the links."""
    tombstone = SubscriptionHead(None, sub.head.created_ms, sub.head.generation, None, now_ms)
    return Step((SetHead(tombstone), *(DropLink(path) for path in sub.links)))


def add_streams(sub: Subscription, tails: Mapping[str, str | None]) -> Step:
    """Add explicit links; new ones start at the current tail."""
    changes: list[Change] = []
    for path, tail in tails.items():
        link = sub.links.get(path)
        if path == sub.config.wake_stream or (link is not None and link.explicit):
            continue
        if link is None:
            link = StreamLink(tail or BEFORE_FIRST, explicit=True, glob=tail is not None and sub.wants(path))
        changes.append(SetLink(path, replace(link, explicit=True)))
    return Step(tuple(changes))


def remove_stream(sub: Subscription, path: str) -> Step:
    """Remove an explicit link; a link by pattern stays."""
    link = sub.links.get(path)
    if link is None or not link.explicit:
        return Step()
    if link.glob:
        return Step((SetLink(path, replace(link, explicit=False)),))
    return Step((DropLink(path),))


def stream_created(sub: Subscription, path: str, cursor: str) -> Step:
    """Link a new stream before its first entry, so that the first append wakes."""
    link = sub.links.get(path)
    glob = sub.wants(path)
    if not glob and link is None:
        return Step()
    if link is not None and link.acked != BEFORE_FIRST:
        return Step()
    return Step((SetLink(path, StreamLink(cursor, link is not None and link.explicit, glob)),))


def stream_deleted(sub: Subscription, path: str) -> Step:
    """Remove the link of a deleted stream; an explicit one waits for its recreation."""
    link = sub.links.get(path)
    if link is None:
        return Step()
    if link.explicit:
        return Step((SetLink(path, StreamLink(BEFORE_FIRST, explicit=True, glob=False)),))
    return Step((DropLink(path),))


# -- wakes ------------------------------------------------------------------------------------------------


def current_wake(sub: Subscription, now_ms: int) -> Wake | None:
    """The wake that can be answered now; not one whose lease has expired, even if the timer is late."""
    return None if lease_expired(sub, now_ms) else sub.wake


def lease_expired(sub: Subscription, now_ms: int) -> bool:
    wake = sub.wake
    return (
        wake is not None
        and wake.lease_until_ms is not None
        and wake.attempt_at_ms is None
        and sub.delivering != wake.generation
        and _is_due(wake.lease_until_ms, now_ms, sub.config.lease_ttl_ms)
    )


def _is_due(at_ms: int, now_ms: int, ms_max: int) -> bool:
    """Whether a time has come that was at most `ms_max` ahead when it was set.

    A time more than twice as far ahead was set before the clock was set back. A small step of the clock must
    not end a lease.
    """
    return now_ms >= at_ms or at_ms - now_ms > 2 * ms_max


def next_wake(sub: Subscription, now_ms: int, wake_id: str) -> Step:
    """A step that is due by itself: the end of a lease, or a wake for pending entries."""
    over = lease_expired(sub, now_ms)
    if sub.wake is not None and not over:
        return Step()
    wake = _issue(sub, sub.pending, now_ms, wake_id)
    if wake is None and not over:
        return Step()
    return Step((_head(sub, wake),), wake)


def due_at_ms(sub: Subscription) -> int | None:
    """The time of the next step that is due by itself."""
    wake = sub.wake
    if wake is None or sub.delivering == wake.generation:
        return None
    return wake.lease_until_ms if wake.attempt_at_ms is None else wake.attempt_at_ms


def due_in_ms(sub: Subscription, now_ms: int) -> int | None:
    """Milliseconds until then: at most twice a lease or a retry pause, even if the clock was set back."""
    at_ms = due_at_ms(sub)
    if at_ms is None or sub.wake is None:
        return None
    ms_max = sub.config.lease_ttl_ms if sub.wake.attempt_at_ms is None else RETRY_DELAY_MS_MAX
    return 0 if _is_due(at_ms, now_ms, ms_max) else at_ms - now_ms


def claim(sub: Subscription, worker: str, now_ms: int, wake_id: str) -> Step:
    """A worker claims the wake; one is issued at once if there are pending entries and no wake."""
    wake = current_wake(sub, now_ms)
    if wake is not None and wake.holder is not None:
        raise TailraceError(
            "ALREADY_CLAIMED",
            "another worker holds this subscription",
            current_holder=wake.holder,
            generation=wake.generation,
        )
    if not sub.pending:
        raise TailraceError("NO_PENDING_WORK", "this subscription has no pending entries")
    if wake is None:
        wake = _issue(sub, sub.pending, now_ms, wake_id)
        assert wake is not None, "there are pending entries"
    claimed = replace(
        wake, holder=worker, tails=_snapshot(sub.pending), lease_until_ms=now_ms + sub.config.lease_ttl_ms
    )
    return Step((_head(sub, claimed),), claimed)


def apply_answer(sub: Subscription, answer: WakeAnswer, now_ms: int, wake_id: str) -> Step:
    """Acks from the holder of the wake. `done` ends it, otherwise the lease is renewed."""
    wake = _require_current(sub, answer, now_ms)
    cursors = _check_acks(sub, answer.acks)
    return _settle(sub, wake, cursors, done=answer.done, now_ms=now_ms, wake_id=wake_id)


def release(sub: Subscription, answer: WakeAnswer, now_ms: int, wake_id: str) -> Step:
    """The holder releases the wake without acks; another one follows if entries are pending."""
    wake = _require_current(sub, answer, now_ms)
    return _settle(sub, wake, {}, done=True, now_ms=now_ms, wake_id=wake_id)


# -- webhook deliveries -----------------------------------------------------------------------------------


def begin_attempt(sub: Subscription, now_ms: int) -> Step:
    """Retry a failed delivery: the same wake, with a lease that starts now."""
    wake = sub.wake
    if wake is None or wake.attempt_at_ms is None:
        return Step()
    if not _is_due(wake.attempt_at_ms, now_ms, RETRY_DELAY_MS_MAX):
        return Step()
    if sub.delivering == wake.generation:
        return Step()
    again = replace(wake, lease_until_ms=now_ms + sub.config.lease_ttl_ms)
    return Step((_head(sub, again),), again)


def delivery_succeeded(sub: Subscription, generation: int, *, done: bool, now_ms: int, wake_id: str) -> Step:
    """The webhook returned 2xx. With `done` the snapshot is acked and the wake ends."""
    wake = sub.wake
    if wake is None or wake.generation != generation:
        return Step()  # answered by a callback, or deleted, before the response arrived
    if done:
        cursors = {
            path: tail
            for path, tail in wake.tails.items()
            if path in sub.links and sub.links[path].acked < tail <= sub.tail_of(path)
        }
        return _settle(sub, wake, cursors, done=True, now_ms=now_ms, wake_id=wake_id)
    return Step((_head(sub, replace(wake, attempt_at_ms=None, failures=0)),))


def delivery_failed(sub: Subscription, generation: int, now_ms: int, jitter: float) -> Step:
    """The delivery failed. `jitter` is between -1 and 1."""
    wake = sub.wake
    if wake is None or wake.generation != generation:
        return Step()
    failures = wake.failures + 1
    pause_ms = retry_delay_ms(failures, jitter)
    return Step((_head(sub, replace(wake, failures=failures, attempt_at_ms=now_ms + pause_ms)),))


def retry_delay_ms(failures: int, jitter: float) -> int:
    assert failures >= 1
    assert -1 <= jitter <= 1
    pause_ms = backoff_delay(failures, RETRY_MS_FIRST, RETRY_MS_MAX)
    return round(pause_ms * (1 + RETRY_JITTER * jitter))


# -- internal ---------------------------------------------------------------------------------------------


def _require_current(sub: Subscription, answer: WakeAnswer, now_ms: int) -> Wake:
    wake = current_wake(sub, now_ms)
    if (
        wake is None
        or answer.token_generation != wake.generation
        or answer.generation != wake.generation
        or answer.wake_id != wake.id
        or (sub.config.type == "pull-wake" and wake.holder is None)
    ):
        raise TailraceError(
            "FENCED", "this wake has ended: its lease expired, it was answered, or a newer one was issued"
        )
    return wake


def _check_acks(sub: Subscription, acks: Sequence[StreamAck]) -> dict[str, str]:
    """The cursors of all acks, checked before any is applied. The highest one of a stream counts."""
    cursors: dict[str, str] = {}
    for ack in acks:
        link = sub.links.get(ack.stream)
        if not ack.offset:
            raise invalid_offset(ack.stream, "the offset must be one returned by this server")
        if link is None:
            raise invalid_offset(ack.stream, "the stream is not linked to this subscription")
        if ack.offset < link.acked:
            raise invalid_offset(ack.stream, "the offset is below the cursor")
        if ack.offset > sub.tail_of(ack.stream) or ack.offset == BEFORE_FIRST:
            raise invalid_offset(ack.stream, "the offset is past the stream's tail")
        cursors[ack.stream] = max(ack.offset, cursors.get(ack.stream, ""))
    return cursors


def invalid_offset(stream: str, reason: str) -> TailraceError:
    return TailraceError("INVALID_OFFSET", reason, stream=stream)


def _settle(
    sub: Subscription, wake: Wake, cursors: Mapping[str, str], *, done: bool, now_ms: int, wake_id: str
) -> Step:
    """Move cursors, then end the wake (and issue the next one if entries are pending) or extend its lease."""
    changes: list[Change] = [
        SetLink(path, replace(sub.links[path], acked=cursor))
        for path, cursor in cursors.items()
        if cursor != sub.links[path].acked
    ]
    if not done:
        # The caller has the wake, even if our POST seemed to fail: it need not be sent again.
        held = replace(wake, lease_until_ms=now_ms + sub.config.lease_ttl_ms, attempt_at_ms=None, failures=0)
        return Step((*changes, _head(sub, held)))
    pending = {path: tail for path, tail in sub.pending.items() if tail > cursors.get(path, "")}
    following = _issue(sub, pending, now_ms, wake_id)
    return Step((*changes, _head(sub, following)), following)


def _issue(sub: Subscription, pending: Mapping[str, str], now_ms: int, wake_id: str) -> Wake | None:
    if not pending:
        return None
    webhook = sub.config.type == "webhook"
    return Wake(
        id=wake_id,
        generation=sub.head.generation + 1,
        tails=_snapshot(pending),
        lease_until_ms=now_ms + sub.config.lease_ttl_ms if webhook else None,
        # Due at once: after a restart before the webhook has responded it is tried again.
        attempt_at_ms=now_ms if webhook else None,
    )


def _snapshot(pending: Mapping[str, str]) -> dict[str, str]:
    if len(pending) <= WAKE_STREAMS_MAX:
        return dict(pending)
    return {path: pending[path] for path, _ in zip(pending, range(WAKE_STREAMS_MAX), strict=False)}


def _head(sub: Subscription, wake: Wake | None) -> SetHead:
    generation = sub.head.generation if wake is None else wake.generation
    return SetHead(replace(sub.head, wake=wake, generation=generation))
