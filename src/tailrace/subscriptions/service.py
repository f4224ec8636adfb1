"""All subscriptions of a server: index by stream name, restore, wake, manage.

Who has to hear of what: from a stream's name to the subscriptions it concerns.

Subscriptions over the log: restored at start, told of every change, woken when there is something new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
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
from tailrace.subscriptions.webhooks import WebhookSender, new_wake_id


class SubscriptionIndex:
    """Look-ups by name that cost nothing for streams nobody subscribes to."""

    def __init__(self) -> None:
        self.followers: dict[str, list[SubscriptionRunner]] = {}
        self.wake_streams: dict[str, list[SubscriptionRunner]] = {}
        self._globs: dict[
            str, list[SubscriptionRunner]
        ] = {}  # by the first segment of the pattern, "" if that is a star

    def add(self, agent: SubscriptionRunner) -> None:
        sub = agent.sub
        for path in sub.links:
            self.follow(path, agent)
        for index, key in self._places(agent):
            index.setdefault(key, []).append(agent)

    def remove(self, agent: SubscriptionRunner) -> None:
        for path in list(agent.sub.links):
            self.unfollow(path, agent)
        for index, key in self._places(agent):
            _remove_runner(index, key, agent)

    def follow(self, path: str, agent: SubscriptionRunner) -> None:
        agents = self.followers.setdefault(path, [])
        if agent not in agents:
            agents.append(agent)

    def unfollow(self, path: str, agent: SubscriptionRunner) -> None:
        _remove_runner(self.followers, path, agent)

    def wanting(self, name: str) -> list[SubscriptionRunner]:
        """The subscriptions whose pattern matches a name."""
        candidates = [*self._globs.get(name.partition("/")[0], ()), *self._globs.get("", ())]
        return [agent for agent in candidates if agent.sub.wants(name)]

    def concerned(self, name: str) -> list[SubscriptionRunner]:
        """Those that follow the stream, and those that would."""
        return list(dict.fromkeys([*self.followers.get(name, ()), *self.wanting(name)]))

    def _places(self, agent: SubscriptionRunner) -> Iterator[tuple[dict[str, list[SubscriptionRunner]], str]]:
        config = agent.config
        if config.pattern is not None:
            first = config.pattern.partition("/")[0]
            yield self._globs, "" if first in ("*", "**") else first
        if config.wake_stream is not None:
            yield self.wake_streams, config.wake_stream


def _remove_runner(index: dict[str, list[SubscriptionRunner]], key: str, agent: SubscriptionRunner) -> None:
    agents = index.get(key)
    if agents is not None and agent in agents:
        agents.remove(agent)
        if not agents:
            del index[key]


logger = logging.getLogger("tailrace.subscriptions")

SUBSCRIPTIONS_MAX: Final = 100_000
SCAN_PAGE: Final = 500
WAKE_EVENT_RETRY_S: Final = 1

# (agent, whether it is new, why not)
CreatedCallback = Callable[[SubscriptionRunner, bool, TailraceError | None], None]


class SubscriptionService:
    """All subscriptions of a server. It watches the log only while there are any."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        telemetry: ServerMetrics,
    ) -> None:
        self._log = log
        self._tombstone_ms = settings.limits.tombstone_ms
        self._clock = clock
        self._loop = loop
        self.keys = ServerKeys(log, clock, loop, settings)
        self.webhooks = WebhookSender(settings, self.keys, clock, loop, telemetry)
        self._agents: dict[str, SubscriptionRunner] = {}
        self._tombstones: dict[str, SubscriptionHead] = {}
        self._index = SubscriptionIndex()
        self._creating: set[asyncio.Task[None]] = set()
        # What appends have to pass on a stream with a schema or a profile.
        self.check: Callable[[AppendRequest, Stream], Sequence[bytes | None] | None] | None = None
        telemetry.subscriptions.read = lambda: len(self._agents)

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes up every subscription where it was: wakes, leases, retries, and what happened meanwhile."""
        self.keys.load()
        found, orphans = decode_subscriptions(self._log.streams.meta.items())
        now_ms = self.now_ms()
        for subscription_id, sub in found.items():
            if not sub.deleted:
                self._adopt(SubscriptionRunner(sub, self, self._loop, created=True))
            elif now_ms - (sub.head.deleted_ms or 0) > self._tombstone_ms:
                orphans.append(HEAD_PREFIX + subscription_id)
            else:
                self._tombstones[subscription_id] = sub.head
        if orphans and self._log.refusal is None:
            self._log.put_metas([(key, None) for key in orphans])
        await self._log.committer.drain()
        await self._reconcile()
        for agent in list(self._agents.values()):
            self._announce_again(agent)
            agent.poke()

    async def stop(self) -> None:
        """Ends what is under way; the next server goes on from what is durable."""
        self.keys.stop()
        for agent in list(self._agents.values()):
            agent.close(TailraceError("unavailable", "the server is stopping"))
        self._watch(False)
        for task in list(self._creating):
            task.cancel()
        await asyncio.gather(*self._creating, return_exceptions=True)
        await self.webhooks.stop()

    async def _reconcile(self) -> None:
        """Compares links with the log: a crash may have come between a change and its link."""
        patterns = [agent.sub.pattern for agent in self._agents.values()]
        scanned: list[str] = []
        for prefix in sorted({pattern.prefix for pattern in patterns if pattern is not None}):
            if scanned and prefix.startswith(scanned[-1]):
                continue
            scanned.append(prefix)
            for page in self.scan(prefix):
                for name, _offset in page:
                    for agent in self._index.wanting(name):
                        if name not in agent.sub.links:
                            agent.note(name, exists=True)
                await asyncio.sleep(0)
        looked_at = 0
        for agent in list(self._agents.values()):
            for path, link in list(agent.sub.links.items()):
                tail = self.tail(path)
                if (tail is None) != (link.acked == BEFORE_FIRST):
                    agent.note(path, exists=tail is not None)
                elif tail is not None:
                    agent.sub.observe(path, tail.offset)
                looked_at += 1
                if looked_at % SCAN_PAGE == 0:
                    await asyncio.sleep(0)

    def scan(self, prefix: str) -> Iterator[list[tuple[str, str]]]:
        """Existing streams and their tails, by pages. The server's own are not among them."""
        after = ""
        while True:
            page = list_streams(self._log, after, prefix, SCAN_PAGE, system=False)
            yield [(stream.name, stream.offset(stream.visible)) for stream in page]
            if len(page) < SCAN_PAGE:
                return
            after = page[-1].name

    def _adopt(self, agent: SubscriptionRunner) -> None:
        self._agents[agent.sub.id] = agent
        self._index.add(agent)
        self._watch(True)

    def _dismiss(self, agent: SubscriptionRunner, refusal: TailraceError) -> None:
        del self._agents[agent.sub.id]
        self._index.remove(agent)
        agent.close(refusal)
        if not self._agents:
            self._watch(False)

    def _watch(self, wanted: bool) -> None:
        watching = self in self._log.publisher.observers
        if wanted and not watching:
            self._log.publisher.observers.append(self)
        elif watching and not wanted:
            self._log.publisher.observers.remove(self)

    # -- what the log tells --------------------------------------------------------------------------------

    def on_created(self, stream: Stream) -> None:
        self.created(stream.name)

    def on_published(self, stream: Stream) -> None:
        if stream.name in self._index.followers:
            self.moved(stream.name, stream.offset(stream.visible))

    def on_removed(self, stream: Stream) -> None:
        self.removed(stream.name)

    def created(self, name: str) -> None:
        for agent in self._index.concerned(name):
            agent.note(name, exists=True)
        for agent in self._index.wake_streams.get(name, ()):
            self._announce_again(agent)

    def moved(self, name: str, offset: str) -> None:
        for agent in self._index.followers.get(name, ()):
            agent.moved(name, offset)

    def removed(self, name: str) -> None:
        for agent in self._index.concerned(name):
            agent.note(name, exists=False)
        for agent in self._index.wake_streams.get(name, ()):
            agent.announced = None  # the event went with the stream; its successor gets it again

    # -- what agents need ----------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def new_wake_id(self) -> str:
        return new_wake_id()

    def tail(self, path: str) -> StreamTail | None:
        """Looks without loading: a subscription over many idle streams must not bring them into memory."""
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

    def follow(self, path: str, agent: SubscriptionRunner) -> None:
        self._index.follow(path, agent)

    def unfollow(self, path: str, agent: SubscriptionRunner) -> None:
        self._index.unfollow(path, agent)

    def send(self, agent: SubscriptionRunner, wake: Wake) -> None:
        if agent.config.type == "webhook":
            self.webhooks.send(agent, wake)
        elif wake.holder is None:
            self._announce(agent, wake)

    def _announce(self, agent: SubscriptionRunner, wake: Wake) -> None:
        """Writes the wake event. Without a stream to write to, the wake can still be claimed.

        However often this is tried, over crashes too, the stream takes an event once: the subscription is a
        producer of its wake stream, and each generation an epoch with one append.
        """
        name = agent.config.wake_stream
        assert name is not None, "a pull-wake subscription has a wake stream"
        body = views.wake_event(agent.sub, wake, self.now_ms())

        def written(error: TailraceError | None) -> None:
            if error is None:
                agent.announced = wake.generation
                agent.warned = False
            else:
                self._not_announced(agent, error)

        try:
            self.write_wake(name, body, (_producer_id(agent), wake.generation, 0), written)
        except TailraceError as refusal:
            self._not_announced(agent, refusal)

    def write_wake(
        self, name: str, body: bytes, producer: tuple[str, int, int], written: SavedCallback
    ) -> None:
        request = AppendRequest(body, "application/json", producer=producer)
        if self.check is not None:
            # A schema or a profile of the wake stream holds for the server as for everybody.
            request.check = self.check
        self._log.append(self._log.existing(name), request, lambda _, error: written(error), None)

    def _not_announced(self, agent: SubscriptionRunner, error: TailraceError) -> None:
        if error.retry_after_s is not None or error.code == "append_timeout":
            self._loop.call_later(error.retry_after_s or WAKE_EVENT_RETRY_S, self._announce_again, agent)
        elif not agent.warned:
            agent.warned = True  # once, not for every wake until somebody makes the stream
            name = agent.config.wake_stream
            logger.warning("wake of %r not written to %r: %s", agent.sub.id, name, error)

    def _announce_again(self, agent: SubscriptionRunner) -> None:
        """For a wake whose event may not have been written, and that nobody has claimed."""
        wake = agent.sub.wake
        if agent.closed or agent.config.type != "pull-wake" or wake is None:
            return
        if wake.holder is None and agent.announced != wake.generation:
            self._announce(agent, wake)

    # -- what the routes need ------------------------------------------------------------------------------

    def find(self, subscription_id: str) -> SubscriptionRunner:
        agent = self._agents.get(subscription_id)
        if agent is None or not agent.created:
            raise subscription_not_found(subscription_id)
        return agent

    def create(
        self, subscription_id: str, config: SubscriptionConfig, base_url: str, told: CreatedCallback
    ) -> None:
        """Makes a subscription, or confirms one with the same configuration."""
        agent = self._agents.get(subscription_id)
        if agent is not None:
            self._confirm(agent, config, base_url, told)
            return
        if len(self._agents) >= SUBSCRIPTIONS_MAX:
            raise TailraceError("overloaded", f"there are {SUBSCRIPTIONS_MAX} subscriptions already")
        tombstone = self._tombstones.get(subscription_id)
        generation = 0 if tombstone is None else tombstone.generation
        head = SubscriptionHead(config, self.now_ms(), generation, base_url=base_url)
        agent = SubscriptionRunner(Subscription(subscription_id, head), self, self._loop, created=False)
        agent.busy = True  # what arrives before it exists waits
        self._adopt(agent)
        task = self._loop.create_task(self._create(agent, told))
        self._creating.add(task)
        task.add_done_callback(self._creating.discard)

    def _confirm(
        self, agent: SubscriptionRunner, config: SubscriptionConfig, base_url: str, told: CreatedCallback
    ) -> None:
        if agent.config.hash() != config.hash():
            raise TailraceError(
                "SUBSCRIPTION_ALREADY_EXISTS", "a subscription of this id has another configuration"
            )

        def decide(_now_ms: int) -> Step:
            return state_machine.confirm(agent.sub, base_url)

        def settled(_: Step, error: TailraceError | None) -> None:
            told(agent, False, error)

        agent.submit(SubscriptionJob(decide, settled))

    async def _create(self, agent: SubscriptionRunner, told: CreatedCallback) -> None:
        """Finds what exists, without holding up the server while there is much of it."""
        sub = agent.sub
        try:
            await self.hear_of(sub.config)
        except TailraceError as error:
            self._dismiss(agent, error)
            told(agent, True, error)
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
                        # Its movements count from here on, though the link is not saved yet.
                        self.follow(name, agent)
                await asyncio.sleep(0)

        def decide(_now_ms: int) -> Step:
            return state_machine.create(sub, existing.items())

        def settled(_: Step, error: TailraceError | None) -> None:
            if error is None:
                agent.created = True
                self._tombstones.pop(sub.id, None)
            else:
                self._dismiss(agent, error)
            told(agent, True, error)

        agent.busy = False
        agent.run(SubscriptionJob(decide, settled))

    async def hear_of(self, config: SubscriptionConfig) -> None:
        """Returns when what there is of a subscription's streams is known; of this log's it always is."""

    def delete(self, agent: SubscriptionRunner, told: StepCallback) -> None:
        sub = agent.sub

        def decide(now_ms: int) -> Step:
            return state_machine.delete(sub, now_ms)

        def settled(step: Step, error: TailraceError | None) -> None:
            if error is None:
                self._tombstones[sub.id] = sub.head
                self._dismiss(agent, subscription_not_found(sub.id))
            told(step, error)

        agent.submit(SubscriptionJob(decide, settled))

    def add_streams(self, agent: SubscriptionRunner, paths: Sequence[str], told: StepCallback) -> None:
        def decide(_now_ms: int) -> Step:
            tails = {path: self.tail(path) for path in paths}
            return state_machine.add_streams(
                agent.sub, {path: None if tail is None else tail.offset for path, tail in tails.items()}
            )

        agent.submit(SubscriptionJob(decide, told))

    def remove_stream(self, agent: SubscriptionRunner, path: str, told: StepCallback) -> None:
        def decide(_now_ms: int) -> Step:
            return state_machine.remove_stream(agent.sub, path)

        agent.submit(SubscriptionJob(decide, told))

    def claim(self, agent: SubscriptionRunner, worker: str, told: StepCallback) -> None:
        def decide(now_ms: int) -> Step:
            return state_machine.claim(agent.sub, worker, now_ms, new_wake_id())

        agent.submit(SubscriptionJob(decide, told))

    def answer(
        self,
        agent: SubscriptionRunner,
        token: WakeToken,
        given: WakeAnswer,
        told: StepCallback,
        *,
        release: bool,
    ) -> None:
        """A callback, ack or release. A superseded token is fenced; only a current one can be expired."""
        decision = state_machine.release if release else state_machine.apply_answer

        def decide(now_ms: int) -> Step:
            for ack in given.acks:
                tail = self.tail(ack.stream)
                agent.sub.observe(ack.stream, None if tail is None else tail.offset)
            step = decision(agent.sub, given, now_ms, new_wake_id())
            if now_ms >= token.expires_ms:
                raise expired_wake_token()
            return step

        agent.submit(SubscriptionJob(decide, told))


def _producer_id(agent: SubscriptionRunner) -> str:
    """Not one that a client can send: no header contains a line end. A subscription made anew is another."""
    return f"wake\n{agent.sub.id}\n{agent.sub.head.created_ms}"


def subscription_not_found(subscription_id: str) -> TailraceError:
    return TailraceError("SUBSCRIPTION_NOT_FOUND", f"there is no subscription {subscription_id!r}")
