"""Runs one subscription: one step at a time; each step is durable before the next one is decided."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from tailrace.common.errors import TailraceError
from tailrace.subscriptions import state_machine
from tailrace.subscriptions.model import (
    BEFORE_FIRST,
    Change,
    DropLink,
    SetLink,
    Subscription,
    Wake,
    encode_changes,
    first_cursor,
)
from tailrace.subscriptions.state_machine import Step

JOBS_MAX: Final = 1000
# Created and deleted streams in one commit.
EVENTS_PER_STEP: Final = 1000
# Records of one journal transaction; a subscription with more links is saved in several.
RECORDS_PER_SAVE: Final = 5000
SAVE_RETRY_S: Final = 1.0
TIMER_S_MIN: Final = 0.01


class StreamTail(NamedTuple):
    """The visible end of a stream."""

    offset: str
    empty: bool


Decide = Callable[[int], Step]
StepCallback = Callable[[Step, TailraceError | None], None]
SavedCallback = Callable[[TailraceError | None], None]


class SubscriptionJob(NamedTuple):
    """A decision for later, and the callback after it was committed or refused."""

    decide: Decide
    settled: StepCallback
    # Of the server itself: repeated until it can be saved.
    must_succeed: bool = False


class SubscriptionHost(Protocol):
    """The service as used by a runner."""

    def now_ms(self) -> int: ...
    def new_wake_id(self) -> str: ...
    def tail(self, path: str) -> StreamTail | None: ...
    def save(self, records: Sequence[tuple[str, bytes | None]], done: SavedCallback) -> None: ...
    def follow(self, path: str, runner: SubscriptionRunner) -> None: ...
    def unfollow(self, path: str, runner: SubscriptionRunner) -> None: ...
    def send(self, runner: SubscriptionRunner, wake: Wake) -> None: ...


class SubscriptionRunner:
    """One running subscription. Everything happens on the loop thread."""

    __slots__ = (
        "_events",
        "_host",
        "_jobs",
        "_loop",
        "_scheduled",
        "_stalled",
        "_timer",
        "announced",
        "busy",
        "closed",
        "config",
        "created",
        "moved_while_saving",
        "sub",
        "warned",
    )

    def __init__(
        self, sub: Subscription, host: SubscriptionHost, loop: asyncio.AbstractEventLoop, *, created: bool
    ) -> None:
        self.sub = sub
        self.config = sub.config  # still available after deletion
        self._host = host
        self._loop = loop
        self._jobs: deque[SubscriptionJob] = deque()
        self._events: deque[tuple[str, bool]] = deque()
        self._scheduled = False
        self._stalled = False
        self._timer: asyncio.TimerHandle | None = None
        self.created = created  # False until its creation is durable
        self.busy = False  # a step is being saved
        self.closed = False
        self.announced: int | None = None  # generation whose wake event was written
        self.warned = False  # about the wake stream
        # Streams whose tail moved while their link was being saved.
        self.moved_while_saving: set[str] = set()

    # -- input -------------------------------------------------------------------------------------------

    def submit(self, job: SubscriptionJob) -> None:
        if len(self._jobs) >= JOBS_MAX and not job.must_succeed:
            raise TailraceError("overloaded", "too many pending requests for this subscription, retry later")
        self._jobs.append(job)
        self.schedule()

    def on_stream_event(self, path: str, *, exists: bool) -> None:
        """A stream was created or deleted; links are updated in that order."""
        self._events.append((path, exists))
        self.schedule()

    def on_tail_moved(self, path: str, tail: str) -> None:
        """A followed stream has a new tail."""
        if path not in self.sub.links:
            self.moved_while_saving.add(path)
            return
        self.sub.observe(path, tail)
        if self.sub.wake is None:
            self.schedule()

    def schedule(self) -> None:
        """Run soon; several calls result in one run."""
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self._loop.call_soon(self._run_next)

    def close(self, refusal: TailraceError) -> None:
        """Stop all activity and refuse pending requests."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._jobs:
            self._jobs.popleft().settled(Step(), refusal)
        self._events.clear()

    # -- one step at a time --------------------------------------------------------------------------------

    def _run_next(self) -> None:
        self._scheduled = False
        while not self.busy and not self.closed:
            job = self._next_job()
            if job is None:
                self._set_due_timer()
                return
            self.run(job)

    def _next_job(self) -> SubscriptionJob | None:
        if self._stalled:
            # The journal accepts nothing now. Requests are refused; the server's own work waits.
            return self._jobs.popleft() if self._jobs and not self._jobs[0].must_succeed else None
        if self._events:
            return self._event_job()
        if self._jobs:
            return self._jobs.popleft()
        step = self._own_step()
        return SubscriptionJob(_always(step), ignore_outcome) if step.changes else None

    def _own_step(self) -> Step:
        now_ms = self._host.now_ms()
        step = state_machine.begin_attempt(self.sub, now_ms)
        return step if step.changes else state_machine.next_wake(self.sub, now_ms, self._host.new_wake_id())

    def _event_job(self) -> SubscriptionJob:
        """Combine events of different streams into one step."""
        batch: dict[str, bool] = {}
        for path, exists in self._events:
            if path in batch or len(batch) >= EVENTS_PER_STEP:
                break
            batch[path] = exists

        def decide(_: int) -> Step:
            changes: list[Change] = []
            for path, exists in batch.items():
                tail = self._host.tail(path)
                if not exists:
                    changes.extend(state_machine.stream_deleted(self.sub, path).changes)
                elif tail is not None:
                    cursor = first_cursor(tail.offset, empty=tail.empty)
                    changes.extend(state_machine.stream_created(self.sub, path, cursor).changes)
            return Step(tuple(changes))

        def settled(_: Step, error: TailraceError | None) -> None:
            if error is None and not self.closed:
                for _path in batch:
                    self._events.popleft()

        return SubscriptionJob(decide, settled)

    def run(self, job: SubscriptionJob) -> None:
        """Decide, save, apply, then call back."""
        try:
            step = job.decide(self._host.now_ms())
        except TailraceError as refusal:
            job.settled(Step(), refusal)
            return
        if not step.changes:
            job.settled(step, None)
            return
        self.busy = True
        new_links = [
            change.path
            for change in step.changes
            if isinstance(change, SetLink) and change.path not in self.sub.links
        ]
        for path in new_links:
            # Follow them from now on, although they are linked only when that is durable.
            self._host.follow(path, self)
        self._save(job, step, new_links, encode_changes(self.sub.id, step.changes))

    def _save(
        self, job: SubscriptionJob, step: Step, new_links: list[str], records: list[tuple[str, bytes | None]]
    ) -> None:
        piece, rest = records[:RECORDS_PER_SAVE], records[RECORDS_PER_SAVE:]

        def done(error: TailraceError | None) -> None:
            if error is not None:
                self._not_saved(job, new_links, error)
            elif rest:
                self._save(job, step, new_links, rest)
            else:
                self._saved(job, step, new_links)

        try:
            self._host.save(piece, done)
        except TailraceError as refusal:
            self._not_saved(job, new_links, refusal)

    def _saved(self, job: SubscriptionJob, step: Step, new_links: list[str]) -> None:
        self.busy = False
        moved, self.moved_while_saving = self.moved_while_saving, set()
        if len(new_links) <= EVENTS_PER_STEP:
            # A cursor at the beginning has pending entries. (More links come from a scan, at their tails.)
            moved.update(new_links, self._waiting_links(step))
        for change in step.changes:
            self.sub.apply(change)
            if isinstance(change, DropLink):
                self._host.unfollow(change.path, self)
        for path in moved:
            tail = self._host.tail(path)
            self.sub.observe(path, None if tail is None else tail.offset)
        job.settled(step, None)
        if step.wake is not None and not self.closed:
            self._host.send(self, step.wake)
        self.schedule()

    def _waiting_links(self, step: Step) -> list[str]:
        """Links of a step whose stream did not exist before."""
        links = self.sub.links
        return [
            change.path
            for change in step.changes
            if isinstance(change, SetLink)
            and change.path in links
            and links[change.path].acked == BEFORE_FIRST
        ]

    def _not_saved(self, job: SubscriptionJob, new_links: list[str], error: TailraceError) -> None:
        """The step did not happen. Requests are refused; the server's own work is retried later."""
        self.busy = False
        self.moved_while_saving.clear()
        for path in new_links:
            self._host.unfollow(path, self)
        if job.must_succeed:
            self._jobs.appendleft(job)
        else:
            job.settled(Step(), error)
        if not self.closed:
            self._stalled = True
            self._set_timer(SAVE_RETRY_S)
            self.schedule()

    # -- time --------------------------------------------------------------------------------------------

    def _set_due_timer(self) -> None:
        """One timer while something is due, otherwise none."""
        if self._stalled:
            return
        due_ms = state_machine.due_in_ms(self.sub, self._host.now_ms())
        if due_ms is not None:
            self._set_timer(due_ms / 1000)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(TIMER_S_MIN, delay_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._stalled = False
        self.schedule()


def _always(step: Step) -> Decide:
    def decide(_now_ms: int) -> Step:
        return step

    return decide


def ignore_outcome(_step: Step, _error: TailraceError | None) -> None:
    """For the server's own work: a step that was not saved is decided again."""
