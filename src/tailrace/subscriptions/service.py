"""All subscriptions of a server: index by stream name, restore at start, wakes, management.

The service observes the log while there are subscriptions, passes stream events to the runners that are
affected, and writes the wake events of pull-wake subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.common.tasks import TaskSet
from tailrace.log.decide import AppendRequest
from tailrace.log.listing import list_streams
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.subscriptions import state_machine, views
from tailrace.subscriptions.keys import ServerKeys, WakeToken, expired_wake_token
from tailrace.subscriptions.model import (
    BEFORE_FIRST,
    HEAD_PREFIX,
    Subscription,
    SubscriptionConfig,
    SubscriptionHead,
    Wake,
    decode_subscriptions,
)
from tailrace.subscriptions.runner import (
    SavedCallback,
    StepCallback,
    StreamTail,
    SubscriptionJob,
    SubscriptionRunner,
)
from tailrace.subscriptions.state_machine import Step, WakeAnswer
from tailrace.subscriptions.webhooks import StartWebhookSpan, WebhookSender, new_wake_id


class SubscriptionIndex:
    """Lookups by stream name, cheap for streams without subscriptions."""

    def __init__(self) -> None:
        self.followers: dict[str, list[SubscriptionRunner]] = {}
        self.wake_streams: dict[str, list[SubscriptionRunner]] = {}
        # By the first segment of the pattern, "" if that is a star.
        self._globs: dict[str, list[SubscriptionRunner]] = {}

    def add(self, runner: SubscriptionRunner) -> None:
        sub = runner.sub
        for path in sub.links:
            self.follow(path, runner)
        for index, key in self._places(runner):
            index.setdefault(key, []).append(runner)

    def remove(self, runner: SubscriptionRunner) -> None:
        for path in list(runner.sub.links):
            self.unfollow(path, runner)
        for index, key in self._places(runner):
            _remove_runner(index, key, runner)

    def follow(self, path: str, runner: SubscriptionRunner) -> None:
        runners = self.followers.setdefault(path, [])
        if runner not in runners:
            runners.append(runner)

    def unfollow(self, path: str, runner: SubscriptionRunner) -> None:
        _remove_runner(self.followers, path, runner)

    def matching(self, name: str) -> list[SubscriptionRunner]:
        """The subscriptions whose pattern matches a name."""
        candidates = [*self._globs.get(name.partition("/")[0], ()), *self._globs.get("", ())]
        return [runner for runner in candidates if runner.sub.wants(name)]

    def affected(self, name: str) -> list[SubscriptionRunner]:
        """The subscriptions that follow the stream, and those whose pattern matches it."""
        return list(dict.fromkeys([*self.followers.get(name, ()), *self.matching(name)]))

    def _places(
        self, runner: SubscriptionRunner
    ) -> Iterator[tuple[dict[str, list[SubscriptionRunner]], str]]:
        config = runner.config
        if config.pattern is not None:
            first = config.pattern.partition("/")[0]
            yield self._globs, "" if first in ("*", "**") else first
        if config.wake_stream is not None:
            yield self.wake_streams, config.wake_stream


def _remove_runner(index: dict[str, list[SubscriptionRunner]], key: str, runner: SubscriptionRunner) -> None:
    runners = index.get(key)
    if runners is not None and runner in runners:
        runners.remove(runner)
        if not runners:
            del index[key]


logger = logging.getLogger("tailrace.subscriptions")

SUBSCRIPTIONS_MAX: Final = 100_000
SCAN_PAGE: Final = 500
WAKE_EVENT_RETRY_S: Final = 1

# (runner, whether it is new, error)
CreatedCallback = Callable[[SubscriptionRunner, bool, TailraceError | None], None]
AppendCheck = Callable[[AppendRequest, Stream], Sequence[bytes | None] | None]


class SubscriptionService:
    """All subscriptions of a server. It observes the log only while there are any."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        telemetry: ServerMetrics,
        check: AppendCheck | None = None,
        trace: StartWebhookSpan | None = None,
    ) -> None:
        """`check` validates appends to a stream with a schema or a profile; `trace` traces webhook calls."""
        self._log = log
        self._tombstone_ms = settings.limits.tombstone_ms
        self._clock = clock
        self._loop = loop
        self.keys = ServerKeys(log, clock, loop, settings)
        self.webhooks = WebhookSender(settings, self.keys, clock, loop, telemetry, trace)
        self._runners: dict[str, SubscriptionRunner] = {}
        self._tombstones: dict[str, SubscriptionHead] = {}
        self._index = SubscriptionIndex()
        self._creating = TaskSet()
        self._check = check
        telemetry.subscriptions.read = lambda: len(self._runners)

    # -- lifecycle -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restore every subscription: wakes, leases, retries, and changes since the last run."""
        self.keys.load()
        found, orphans = decode_subscriptions(self._log.streams.meta.items())
        now_ms = self.now_ms()
        for subscription_id, sub in found.items():
            if not sub.deleted:
                self._add(SubscriptionRunner(sub, self, self._loop, created=True))
            elif now_ms - (sub.head.deleted_ms or 0) > self._tombstone_ms:
                orphans.append(HEAD_PREFIX + subscription_id)
            else:
                self._tombstones[subscription_id] = sub.head
        if orphans and self._log.refusal is None:
            self._log.put_metas([(key, None) for key in orphans])
        await self._log.committer.drain()
        await self._reconcile()
        for runner in list(self._runners.values()):
            self._retry_wake_event(runner)
            runner.schedule()

    async def stop(self) -> None:
        """Stop running work; the next server continues from the durable state."""
        self.keys.stop()
        for runner in list(self._runners.values()):
            runner.close(TailraceError("unavailable", "the server is stopping"))
        self._watch(False)
        await self._creating.close()
        await self.webhooks.stop()

    async def _reconcile(self) -> None:
        """Compare links with the log: a crash may have come between a change and its link."""
        patterns = [runner.sub.pattern for runner in self._runners.values()]
        scanned: list[str] = []
        for prefix in sorted({pattern.prefix for pattern in patterns if pattern is not None}):
            if scanned and prefix.startswith(scanned[-1]):
                continue
            scanned.append(prefix)
            for page in self.scan(prefix):
                for name, _offset in page:
                    for runner in self._index.matching(name):
                        if name not in runner.sub.links:
                            runner.on_stream_event(name, exists=True)
                await asyncio.sleep(0)
        looked_at = 0
        for runner in list(self._runners.values()):
            for path, link in list(runner.sub.links.items()):
                tail = self.tail(path)
                if (tail is None) != (link.acked == BEFORE_FIRST):
                    runner.on_stream_event(path, exists=tail is not None)
                elif tail is not None:
                    runner.sub.observe(path, tail.offset)
                looked_at += 1
                if looked_at % SCAN_PAGE == 0:
                    await asyncio.sleep(0)

    def scan(self, prefix: str) -> Iterator[list[tuple[str, str]]]:
        """Existing streams and their tails, in pages, without system streams."""
        after = ""
        while True:
            page = list_streams(self._log, after, prefix, SCAN_PAGE, system=False)
            yield [(stream.name, stream.offset(stream.visible)) for stream in page]
            if len(page) < SCAN_PAGE:
                return
            after = page[-1].name

    def _add(self, runner: SubscriptionRunner) -> None:
        self._runners[runner.sub.id] = runner
        self._index.add(runner)
        self._watch(True)

    def _remove(self, runner: SubscriptionRunner, refusal: TailraceError) -> None:
        del self._runners[runner.sub.id]
        self._index.remove(runner)
        runner.close(refusal)
        if not self._runners:
            self._watch(False)

    def _watch(self, enabled: bool) -> None:
        watching = self in self._log.publisher.observers
        if enabled and not watching:
            self._log.publisher.observers.append(self)
        elif watching and not enabled:
            self._log.publisher.observers.remove(self)

    # -- events from the log -------------------------------------------------------------------------------

    def on_created(self, stream: Stream) -> None:
        self.created(stream.name)

    def on_published(self, stream: Stream) -> None:
        if stream.name in self._index.followers:
            self.moved(stream.name, stream.offset(stream.visible))

    def on_removed(self, stream: Stream) -> None:
        self.removed(stream.name)

    def created(self, name: str) -> None:
        for runner in self._index.affected(name):
            runner.on_stream_event(name, exists=True)
        for runner in self._index.wake_streams.get(name, ()):
            self._retry_wake_event(runner)

    def moved(self, name: str, offset: str) -> None:
        for runner in self._index.followers.get(name, ()):
            runner.on_tail_moved(name, offset)

    def removed(self, name: str) -> None:
        for runner in self._index.affected(name):
            runner.on_stream_event(name, exists=False)
        for runner in self._index.wake_streams.get(name, ()):
            runner.announced = None  # the event was deleted with the stream; a new stream gets it again

    # -- used by runners -----------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def new_wake_id(self) -> str:
        return new_wake_id()

    def tail(self, path: str) -> StreamTail | None:
        """Read the tail without loading the stream: subscriptions may cover many idle streams."""
        streams = self._log.streams
        stream = streams.by_name.get(path)
        if stream is None and path not in streams.changed_names:
            stream = self._log.store.stream_by_name(path)
        if stream is None or stream.gone or stream.visible < 0 or stream.expired(self._clock.now_ns()):
            return None
        return StreamTail(stream.offset(stream.visible), empty=stream.visible == 0)

    def save(self, records: Sequence[tuple[str, bytes | None]], done: SavedCallback) -> None:
        def reply(_: Transaction, error: TailraceError | None) -> None:
            done(error)

        self._log.put_metas(records, reply)

    def follow(self, path: str, runner: SubscriptionRunner) -> None:
        self._index.follow(path, runner)

    def unfollow(self, path: str, runner: SubscriptionRunner) -> None:
        self._index.unfollow(path, runner)

    def send(self, runner: SubscriptionRunner, wake: Wake) -> None:
        if runner.config.type == "webhook":
            self.webhooks.send(runner, wake)
        elif wake.holder is None:
            self._write_wake_event(runner, wake)

    def _write_wake_event(self, runner: SubscriptionRunner, wake: Wake) -> None:
        """Write the wake event. If the wake stream does not exist, the wake can still be claimed.

        The event is written once, even over retries and crashes: the subscription is a producer of its wake
        stream, and each generation an epoch with one append.
        """
        name = runner.config.wake_stream
        assert name is not None, "a pull-wake subscription has a wake stream"
        body = views.wake_event(runner.sub, wake, self.now_ms())

        def written(error: TailraceError | None) -> None:
            if error is None:
                runner.announced = wake.generation
                runner.warned = False
            else:
                self._wake_event_failed(runner, error)

        try:
            self.write_wake(name, body, (_producer_id(runner), wake.generation, 0), written)
        except TailraceError as refusal:
            self._wake_event_failed(runner, refusal)

    def write_wake(
        self, name: str, body: bytes, producer: tuple[str, int, int], written: SavedCallback
    ) -> None:
        request = AppendRequest(body, "application/json", producer=producer)
        if self._check is not None:
            # The schema or profile of the wake stream applies to the server too.
            request.check = self._check
        self._log.append(self._log.existing(name), request, lambda _, error: written(error), None)

    def _wake_event_failed(self, runner: SubscriptionRunner, error: TailraceError) -> None:
        if error.retry_after_s is not None or error.code == "append_timeout":
            self._loop.call_later(error.retry_after_s or WAKE_EVENT_RETRY_S, self._retry_wake_event, runner)
        elif not runner.warned:
            runner.warned = True  # once, not for every wake until the stream is created
            fields = log_fields(
                subscription=runner.sub.id, stream=runner.config.wake_stream, error=str(error)
            )
            logger.warning("wake event append failed", extra=fields)

    def _retry_wake_event(self, runner: SubscriptionRunner) -> None:
        """Write the event of an unclaimed wake again, if it may not have been written."""
        wake = runner.sub.wake
        if runner.closed or runner.config.type != "pull-wake" or wake is None:
            return
        if wake.holder is None and runner.announced != wake.generation:
            self._write_wake_event(runner, wake)

    # -- used by routes ------------------------------------------------------------------------------------

    def find(self, subscription_id: str) -> SubscriptionRunner:
        runner = self._runners.get(subscription_id)
        if runner is None or not runner.created:
            raise subscription_not_found(subscription_id)
        return runner

    def create(
        self, subscription_id: str, config: SubscriptionConfig, base_url: str, callback: CreatedCallback
    ) -> None:
        """Create a subscription, or confirm one with the same configuration."""
        runner = self._runners.get(subscription_id)
        if runner is not None:
            self._confirm(runner, config, base_url, callback)
            return
        if len(self._runners) >= SUBSCRIPTIONS_MAX:
            raise TailraceError("overloaded", f"limit of {SUBSCRIPTIONS_MAX} subscriptions reached")
        tombstone = self._tombstones.get(subscription_id)
        generation = 0 if tombstone is None else tombstone.generation
        head = SubscriptionHead(config, self.now_ms(), generation, base_url=base_url)
        runner = SubscriptionRunner(Subscription(subscription_id, head), self, self._loop, created=False)
        runner.busy = True  # events wait until it exists
        self._add(runner)
        self._creating.start(self._create(runner, callback))

    def _confirm(
        self, runner: SubscriptionRunner, config: SubscriptionConfig, base_url: str, callback: CreatedCallback
    ) -> None:
        if runner.config.hash() != config.hash():
            raise TailraceError(
                "SUBSCRIPTION_ALREADY_EXISTS", "a subscription with this id has another configuration"
            )

        def decide(_now_ms: int) -> Step:
            return state_machine.confirm(runner.sub, base_url)

        def settled(_: Step, error: TailraceError | None) -> None:
            callback(runner, False, error)

        runner.submit(SubscriptionJob(decide, settled))

    async def _create(self, runner: SubscriptionRunner, callback: CreatedCallback) -> None:
        """Find existing streams in pages, without blocking the event loop."""
        sub = runner.sub
        try:
            await self.wait_for_streams(sub.config)
        except TailraceError as error:
            self._remove(runner, error)
            callback(runner, True, error)
            return
        existing: dict[str, str | None] = {}
        for path in sub.config.streams:
            tail = self.tail(path)
            existing[path] = None if tail is None else tail.offset
        if sub.pattern is not None:
            for page in self.scan(sub.pattern.prefix):
                for name, offset in page:
                    if sub.wants(name):
                        existing[name] = offset
                        # Follow it from here on, although the link is not saved yet.
                        self.follow(name, runner)
                await asyncio.sleep(0)

        def decide(_now_ms: int) -> Step:
            return state_machine.create(sub, existing.items())

        def settled(_: Step, error: TailraceError | None) -> None:
            if error is None:
                runner.created = True
                self._tombstones.pop(sub.id, None)
            else:
                self._remove(runner, error)
            callback(runner, True, error)

        runner.busy = False
        runner.run(SubscriptionJob(decide, settled))

    async def wait_for_streams(self, config: SubscriptionConfig) -> None:
        """Wait until the state of the subscription's streams is known; for the local log it always is."""

    def delete(self, runner: SubscriptionRunner, callback: StepCallback) -> None:
        sub = runner.sub

        def decide(now_ms: int) -> Step:
            return state_machine.delete(sub, now_ms)

        def settled(step: Step, error: TailraceError | None) -> None:
            if error is None:
                self._tombstones[sub.id] = sub.head
                self._remove(runner, subscription_not_found(sub.id))
            callback(step, error)

        runner.submit(SubscriptionJob(decide, settled))

    def add_streams(self, runner: SubscriptionRunner, paths: Sequence[str], callback: StepCallback) -> None:
        def decide(_now_ms: int) -> Step:
            tails = {path: self.tail(path) for path in paths}
            return state_machine.add_streams(
                runner.sub, {path: None if tail is None else tail.offset for path, tail in tails.items()}
            )

        runner.submit(SubscriptionJob(decide, callback))

    def remove_stream(self, runner: SubscriptionRunner, path: str, callback: StepCallback) -> None:
        def decide(_now_ms: int) -> Step:
            return state_machine.remove_stream(runner.sub, path)

        runner.submit(SubscriptionJob(decide, callback))

    def claim(self, runner: SubscriptionRunner, worker: str, callback: StepCallback) -> None:
        def decide(now_ms: int) -> Step:
            return state_machine.claim(runner.sub, worker, now_ms, new_wake_id())

        runner.submit(SubscriptionJob(decide, callback))

    def answer(
        self,
        runner: SubscriptionRunner,
        token: WakeToken,
        wake_answer: WakeAnswer,
        callback: StepCallback,
        *,
        release: bool,
    ) -> None:
        """A callback, ack or release. A superseded token is fenced; only a current one can be expired."""
        decision = state_machine.release if release else state_machine.apply_answer

        def decide(now_ms: int) -> Step:
            for ack in wake_answer.acks:
                tail = self.tail(ack.stream)
                runner.sub.observe(ack.stream, None if tail is None else tail.offset)
            step = decision(runner.sub, wake_answer, now_ms, new_wake_id())
            if now_ms >= token.expires_ms:
                raise expired_wake_token()
            return step

        runner.submit(SubscriptionJob(decide, callback))


def _producer_id(runner: SubscriptionRunner) -> str:
    """A producer id that no client can send (it has line breaks), unique for each creation."""
    return f"wake\n{runner.sub.id}\n{runner.sub.head.created_ms}"


def subscription_not_found(subscription_id: str) -> TailraceError:
    return TailraceError("SUBSCRIPTION_NOT_FOUND", f"subscription {subscription_id!r} not found")
