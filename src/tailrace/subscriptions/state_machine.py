"""What happens to a subscription: pure decisions over its state, without clock, I/O or chance of their own.

Each function looks at a `Subscription` and returns a `Step`: the changes to make durable and then to apply,
and whether a wake has to be sent out after that. Nothing is changed here, so a step that cannot be saved has
not happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

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
# Streams one wake covers. What is pending beyond that follows in the next wake.
WAKE_STREAMS_MAX: Final = 1000
# With more links than this, a wake lists only those with work.
LISTED_STREAMS_MAX: Final = 1000


class Step(msgspec.Struct, frozen=True):
    """A decision: what becomes durable, and whether its wake then goes out."""

    changes: tuple[Change, ...] = ()
    wake: Wake | None = None


class StreamAck(msgspec.Struct, frozen=True):
    stream: str
    offset: str  # in the form the server writes; empty if it was malformed


class WakeAnswer(msgspec.Struct, frozen=True):
    """A callback, ack or release: which wake it speaks for, by its token and by its body."""

    token_generation: int
    generation: int
    wake_id: str
    acks: Sequence[StreamAck] = ()
    done: bool = False


# -- configuration and links ------------------------------------------------------------------------------


def create(sub: Subscription, existing: Iterable[tuple[str, str | None]]) -> Step:
    """A new subscription over streams that exist, at their tails: nothing is replayed.

    `existing` are the named streams (None for those not there yet) and all that match. The head's generation
    continues that of a deleted subscription of the same id, so that its tokens stay fenced. It is saved last:
    without it there is no subscription.
    """
    named = set(sub.config.streams)
    changes: list[Change] = []
    for path, tail in existing:
        glob = tail is not None and sub.wants(path)
        if path != sub.config.wake_stream and (glob or path in named):
            changes.append(SetLink(path, StreamLink(tail or BEFORE_FIRST, path in named, glob)))
    return Step((*changes, SetHead(sub.head)))


def confirm(sub: Subscription, base_url: str) -> Step:
    """The same configuration again. Callbacks follow the client to where it now finds the server."""
    if base_url == sub.head.base_url:
        return Step()
    return Step((SetHead(replace(sub.head, base_url=base_url)),))


def delete(sub: Subscription, now_ms: int) -> Step:
    """A tombstone remembers the generation; links go, after it: from then on they belong to nothing."""
    tombstone = SubscriptionHead(None, sub.head.created_ms, sub.head.generation, None, now_ms)
    return Step((SetHead(tombstone), *(DropLink(path) for path in sub.links)))


def add_streams(sub: Subscription, tails: Mapping[str, str | None]) -> Step:
    """Explicit links; those that are new start at the current tail."""
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
    """Removes an explicit link; what the pattern links stays."""
    link = sub.links.get(path)
    if link is None or not link.explicit:
        return Step()
    if link.glob:
        return Step((SetLink(path, replace(link, explicit=False)),))
    return Step((DropLink(path),))


def stream_created(sub: Subscription, path: str, cursor: str) -> Step:
    """A stream came to be: linked before its first content, so that the first append wakes."""
    link = sub.links.get(path)
    glob = sub.wants(path)
    if not glob and link is None:
        return Step()
    if link is not None and link.acked != BEFORE_FIRST:
        return Step()
    return Step((SetLink(path, StreamLink(cursor, link is not None and link.explicit, glob)),))


def stream_deleted(sub: Subscription, path: str) -> Step:
    """A stream is gone: what only the pattern linked goes with it, a named one waits for its return."""
    link = sub.links.get(path)
    if link is None:
        return Step()
    if link.explicit:
        return Step((SetLink(path, StreamLink(BEFORE_FIRST, explicit=True, glob=False)),))
    return Step((DropLink(path),))


# -- wakes ------------------------------------------------------------------------------------------------


def current_wake(sub: Subscription, now_ms: int) -> Wake | None:
    """The wake that may be answered now: one whose lease ran out is over, however late the timer is."""
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
    """Whether an instant has come that was at most `ms_max` ahead when it was set.

    One that is twice as far ahead was set before the clock was set back. A small step of the clock must not
    end a lease.
    """
    return now_ms >= at_ms or at_ms - now_ms > 2 * ms_max


def next_wake(sub: Subscription, now_ms: int, wake_id: str) -> Step:
    """What is due now without anybody asking: the end of a lease, a wake for pending work."""
    over = lease_expired(sub, now_ms)
    if sub.wake is not None and not over:
        return Step()
    wake = _issue(sub, sub.pending, now_ms, wake_id)
    if wake is None and not over:
        return Step()
    return Step((_head(sub, wake),), wake)


def due_at_ms(sub: Subscription) -> int | None:
    """When this subscription next needs attention without anybody asking."""
    wake = sub.wake
    if wake is None or sub.delivering == wake.generation:
        return None
    return wake.lease_until_ms if wake.attempt_at_ms is None else wake.attempt_at_ms


def due_in_ms(sub: Subscription, now_ms: int) -> int | None:
    """How long until then: at most twice a lease or a pause, also when the clock was set back."""
    at_ms = due_at_ms(sub)
    if at_ms is None or sub.wake is None:
        return None
    ms_max = sub.config.lease_ttl_ms if sub.wake.attempt_at_ms is None else RETRY_DELAY_MS_MAX
    return 0 if _is_due(at_ms, now_ms, ms_max) else at_ms - now_ms


def claim(sub: Subscription, worker: str, now_ms: int, wake_id: str) -> Step:
    """A worker takes the wake; one is issued on the spot if there is work and no wake yet."""
    wake = current_wake(sub, now_ms)
    if wake is not None and wake.holder is not None:
        raise TailraceError(
            "ALREADY_CLAIMED",
            "another worker holds this subscription",
            current_holder=wake.holder,
            generation=wake.generation,
        )
    if not sub.pending:
        raise TailraceError("NO_PENDING_WORK", "there is nothing new in this subscription's streams")
    if wake is None:
        wake = _issue(sub, sub.pending, now_ms, wake_id)
        assert wake is not None, "there is work"
    claimed = replace(
        wake, holder=worker, tails=_snapshot(sub.pending), lease_until_ms=now_ms + sub.config.lease_ttl_ms
    )
    return Step((_head(sub, claimed),), claimed)


def apply_answer(sub: Subscription, given: WakeAnswer, now_ms: int, wake_id: str) -> Step:
    """Acks from whoever has the wake. `done` ends it, otherwise the lease starts anew."""
    wake = _require_current(sub, given, now_ms)
    cursors = _check_acks(sub, given.acks)
    return _settle(sub, wake, cursors, done=given.done, now_ms=now_ms, wake_id=wake_id)


def release(sub: Subscription, given: WakeAnswer, now_ms: int, wake_id: str) -> Step:
    """The holder gives the wake back, with nothing acked; another one follows if there is work."""
    wake = _require_current(sub, given, now_ms)
    return _settle(sub, wake, {}, done=True, now_ms=now_ms, wake_id=wake_id)


# -- webhook deliveries -----------------------------------------------------------------------------------


def begin_attempt(sub: Subscription, now_ms: int) -> Step:
    """A delivery that was put off is tried again: the same wake, with a lease that starts now."""
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
    """The hook answered 2xx. With `done` the snapshot is acked and the wake over."""
    wake = sub.wake
    if wake is None or wake.generation != generation:
        return Step()  # answered by a callback, or deleted, before the response came
    if done:
        cursors = {
            path: tail
            for path, tail in wake.tails.items()
            if path in sub.links and sub.links[path].acked < tail <= sub.tail_of(path)
        }
        return _settle(sub, wake, cursors, done=True, now_ms=now_ms, wake_id=wake_id)
    return Step((_head(sub, replace(wake, attempt_at_ms=None, failures=0)),))


def delivery_failed(sub: Subscription, generation: int, now_ms: int, jitter: float) -> Step:
    """The hook did not take the wake. `jitter` is between -1 and 1."""
    wake = sub.wake
    if wake is None or wake.generation != generation:
        return Step()
    failures = wake.failures + 1
    pause_ms = retry_delay_ms(failures, jitter)
    return Step((_head(sub, replace(wake, failures=failures, attempt_at_ms=now_ms + pause_ms)),))


def retry_delay_ms(failures: int, jitter: float) -> int:
    assert failures >= 1
    assert -1 <= jitter <= 1
    pause_ms = min(RETRY_MS_MAX, RETRY_MS_FIRST * 2 ** min(failures - 1, 16))
    return round(pause_ms * (1 + RETRY_JITTER * jitter))


# -- inside -----------------------------------------------------------------------------------------------


def _require_current(sub: Subscription, given: WakeAnswer, now_ms: int) -> Wake:
    wake = current_wake(sub, now_ms)
    if (
        wake is None
        or given.token_generation != wake.generation
        or given.generation != wake.generation
        or given.wake_id != wake.id
        or (sub.config.type == "pull-wake" and wake.holder is None)
    ):
        raise TailraceError(
            "FENCED", "this wake is over: its lease ran out, or it was answered, or a newer one was issued"
        )
    return wake


def _check_acks(sub: Subscription, acks: Sequence[StreamAck]) -> dict[str, str]:
    """The cursors that acks ask for, all checked before any is applied. The furthest of a stream counts."""
    cursors: dict[str, str] = {}
    for ack in acks:
        link = sub.links.get(ack.stream)
        if not ack.offset:
            raise invalid_offset(ack.stream, "not an offset that this server hands out")
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
    """Moves cursors, then ends the wake (and issues the next, if there is work) or extends its lease."""
    changes: list[Change] = [
        SetLink(path, replace(sub.links[path], acked=cursor))
        for path, cursor in cursors.items()
        if cursor != sub.links[path].acked
    ]
    if not done:
        # Whoever calls has the wake, even if our POST seemed to fail: no need to send it again.
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
        # Due at once: a restart before the hook has answered tries again.
        attempt_at_ms=now_ms if webhook else None,
    )


def _snapshot(pending: Mapping[str, str]) -> dict[str, str]:
    if len(pending) <= WAKE_STREAMS_MAX:
        return dict(pending)
    return {path: pending[path] for path, _ in zip(pending, range(WAKE_STREAMS_MAX), strict=False)}


def _head(sub: Subscription, wake: Wake | None) -> SetHead:
    generation = sub.head.generation if wake is None else wake.generation
    return SetHead(replace(sub.head, wake=wake, generation=generation))
