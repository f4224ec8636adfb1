"""The service over a real log, in this process: many streams, crashes between steps, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tailrace.common.clock import SYSTEM_CLOCK
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.log.commit_path import APPEND_TIMED_OUT
from tailrace.log.decide import AppendRequest, CreateRequest
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.log.transaction import Reply, Transaction, ignore_reply
from tailrace.subscriptions import runner as agent_module
from tailrace.subscriptions import service as service_module
from tailrace.subscriptions.keys import WakeToken
from tailrace.subscriptions.model import BEFORE_FIRST, HEAD_PREFIX, LINK_PREFIX, SubscriptionConfig
from tailrace.subscriptions.runner import SubscriptionRunner
from tailrace.subscriptions.service import SubscriptionService
from tailrace.subscriptions.state_machine import Step, WakeAnswer

WAIT_S = 60.0


def pull(pattern: str | None = "events/**", streams: tuple[str, ...] = ()) -> SubscriptionConfig:
    return SubscriptionConfig("pull-wake", pattern, streams, None, "wake", 30_000, None)


class World:
    """A log and the subscriptions over it, in one loop."""

    def __init__(self, directory: Path) -> None:
        # A busy machine is not a failure.
        limits = Limits(append_ms=60_000, journal_file_bytes=4 * 1024 * 1024)
        self.log = Log(directory, limits, SYSTEM_CLOCK, asyncio.get_running_loop())
        self.log.open()
        self.service = SubscriptionService(
            self.log, Settings(), SYSTEM_CLOCK, asyncio.get_running_loop(), ServerMetrics()
        )

    async def close(self) -> None:
        await self.service.stop()
        await self.log.close()

    def settled(self) -> tuple[asyncio.Future[Any], Callable[..., None]]:
        """A future, and a callback of any of our shapes that resolves it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def told(*outcome: Any) -> None:
            error = outcome[-1]
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(outcome[0])

        return future, told

    async def create(self, name: str, count: int = 0) -> None:
        future, told = self.settled()
        initial = AppendRequest(b"1", "application/json") if count else None
        self.log.create(CreateRequest(name, "application/json", initial=initial), told, None)
        await asyncio.wait_for(future, WAIT_S)

    async def append(self, name: str) -> None:
        future, told = self.settled()
        self.log.append(self.log.existing(name), AppendRequest(b"2", "application/json"), told, None)
        await asyncio.wait_for(future, WAIT_S)

    async def subscribe(self, config: SubscriptionConfig, name: str = "s") -> SubscriptionRunner:
        future, told = self.settled()
        self.service.create(name, config, "http://here", told)
        return await asyncio.wait_for(future, WAIT_S)

    async def claim(self, agent: SubscriptionRunner) -> Step:
        future, told = self.settled()
        self.service.claim(agent, "worker", told)
        step: Step = await asyncio.wait_for(future, WAIT_S)
        return step

    async def finish(self, agent: SubscriptionRunner, claimed: Step) -> Step:
        assert claimed.wake is not None
        wake = claimed.wake
        future, told = self.settled()
        token = WakeToken("s", wake.generation, 2**62)
        given = WakeAnswer(wake.generation, wake.generation, wake.id, [], done=True)
        self.service.answer(agent, token, given, told, release=False)
        step: Step = await asyncio.wait_for(future, WAIT_S)
        return step

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 (the condition is about somebody else's state)
                await asyncio.sleep(0.005)


def run(directory: Path, *acts: Callable[[World], Awaitable[None]]) -> None:
    """Each act is one life of the server."""

    async def live(act: Callable[[World], Awaitable[None]]) -> None:
        world = World(directory)
        try:
            await world.service.start()
            await act(world)
        finally:
            await world.close()

    for act in acts:
        asyncio.run(live(act))


def test_it_watches_the_log_only_while_there_are_subscriptions(tmp_path: Path) -> None:
    async def act(world: World) -> None:
        assert world.log.publisher.observers == []
        agent = await world.subscribe(pull())
        assert world.log.publisher.observers == [world.service]
        future, told = world.settled()
        world.service.delete(agent, told)
        await future
        assert world.log.publisher.observers == []

    run(tmp_path, act)


def test_many_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "RECORDS_PER_SAVE", 100)
    monkeypatch.setattr(agent_module, "EVENTS_PER_STEP", 50)
    names = [f"events/{number:04}" for number in range(1200)]

    async def first(world: World) -> None:
        await asyncio.gather(*(world.create(name, 1) for name in names))
        await world.create("other", 1)
        making = asyncio.ensure_future(world.subscribe(pull()))
        # Movements while the links are being found and saved are not lost.
        await asyncio.gather(*(world.append(name) for name in names[:1000:100]))
        agent = await making
        assert set(agent.sub.links) == set(names)
        later = [f"events/later/{number:03}" for number in range(300)]
        await asyncio.gather(*(world.create(name, number % 2) for number, name in enumerate(later)))
        await world.until(lambda: len(agent.sub.links) == 1500)
        for name in later[1::2]:
            assert agent.sub.pending[name] == "00000000000000000004000000"
        for name in later[::2]:
            assert name not in agent.sub.pending
        for name in names[:1000:100]:
            cursor, tail = agent.sub.links[name].acked, agent.sub.tail_of(name)
            assert cursor <= tail == "00000000000000000008000000"

    async def second(world: World) -> None:
        agent = world.service.find("s")
        assert len(agent.sub.links) == 1500
        claimed = await world.claim(agent)
        assert claimed.wake is not None
        assert claimed.wake.tails.keys() >= {f"events/later/{number:03}" for number in range(1, 300, 2)}
        future, told = world.settled()
        world.service.delete(agent, told)
        await future

    async def third(world: World) -> None:
        with pytest.raises(TailraceError, match="not found"):
            world.service.find("s")
        assert [key for key in world.log.streams.meta if key.startswith(LINK_PREFIX)] == []
        assert world.log.streams.meta.keys() >= {HEAD_PREFIX + "s"}

    run(tmp_path, first, second, third)


def test_what_happened_while_nobody_looked_is_found_at_the_start(tmp_path: Path) -> None:
    """A crash between a change and its link leaves the log ahead of the links."""

    async def first(world: World) -> None:
        for name in ("events/kept", "events/deleted", "named/deleted"):
            await world.create(name, 1)
        await world.subscribe(pull(streams=("named/deleted", "named/later")))
        # As if the process had died right after each of these.
        world.log.publisher.observers.clear()
        await world.append("events/kept")
        await world.create("events/new", 1)
        await world.create("events/empty")
        await world.create("named/later", 1)
        for name in ("events/deleted", "named/deleted"):
            future, told = world.settled()
            world.log.remove(world.log.existing(name), "deleted", told, None)
            await future
        world.log.put_metas([(f"{LINK_PREFIX}half-made/x", b"\x93\xa2-1\xc3\xc2")])

    async def second(world: World) -> None:
        agent = world.service.find("s")
        sub = agent.sub
        await world.until(lambda: "events/new" in sub.links and "events/deleted" not in sub.links)
        await world.until(lambda: sub.links["named/deleted"].acked == BEFORE_FIRST)
        await world.until(lambda: sub.links["named/later"].acked != BEFORE_FIRST)
        assert sub.pending.keys() == {"events/kept", "events/new", "named/later"}
        assert sub.links["events/empty"].acked == "0" * 26
        await world.until(lambda: sub.wake is not None)
        assert f"{LINK_PREFIX}half-made/x" not in world.log.streams.meta

    run(tmp_path, first, second)


def test_a_journal_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "SAVE_RETRY_S", 0.01)

    async def act(world: World) -> None:
        await world.create("wake")
        await world.create("events/a", 1)
        agent = await world.subscribe(pull())
        refusal = TailraceError("insufficient_storage", "the disk is full")
        await world.append("events/a")
        claimed = await world.claim(agent)
        before = agent.sub.head
        world.log.refusal = refusal
        with pytest.raises(TailraceError, match="full"):
            await world.finish(agent, claimed)
        with pytest.raises(TailraceError, match="full"):
            await world.subscribe(pull(), "second")
        with pytest.raises(TailraceError, match="not found"):
            world.service.find("second")
        assert agent.sub.head == before
        world.log.refusal = None
        # Nothing happened, so the same answer is good once there is room.
        following = await world.finish(agent, claimed)
        assert following.wake is not None
        assert following.wake.generation == before.generation + 1
        assert (await world.subscribe(pull(), "second")).created

    run(tmp_path, act)


def test_streams_that_appear_while_nothing_can_be_saved_are_linked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "SAVE_RETRY_S", 0.01)

    async def act(world: World) -> None:
        agent = await world.subscribe(pull())
        real = world.service.save
        refused = 0

        def save(records: Any, done: Callable[[TailraceError | None], None]) -> None:
            nonlocal refused
            refused += 1
            done(TailraceError("unavailable", "not now"))

        monkeypatch.setattr(world.service, "save", save)
        await world.create("events/a", 1)
        await world.until(lambda: refused >= 3)
        assert agent.sub.links == {}
        monkeypatch.setattr(world.service, "save", real)
        await world.until(lambda: agent.sub.wake is not None)
        assert agent.sub.pending.keys() == {"events/a"}

    run(tmp_path, act)


def test_concurrent_puts_of_one_id(tmp_path: Path) -> None:
    async def act(world: World) -> None:
        outcomes: list[bool] = []
        futures: list[asyncio.Future[Any]] = []
        for _ in range(3):
            future, told = world.settled()

            def noted(
                agent: SubscriptionRunner,
                new: bool,
                error: TailraceError | None,
                told: Callable[..., None] = told,
            ) -> None:
                outcomes.append(new)
                told(agent, error)

            world.service.create("s", pull(), "http://here", noted)
            futures.append(future)
        with pytest.raises(TailraceError, match="another configuration"):
            world.service.create("s", pull("other"), "http://here", lambda *_: None)
        await asyncio.gather(*futures)
        assert outcomes == [True, False, False]

    run(tmp_path, act)


def test_too_many_requests_for_one_subscription(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "JOBS_MAX", 2)

    async def act(world: World) -> None:
        agent = await world.subscribe(pull())
        outcomes: list[str] = []

        def told(_: Step, error: TailraceError | None) -> None:
            outcomes.append("" if error is None else error.code)

        for _ in range(2):
            world.service.claim(agent, "worker", told)
        with pytest.raises(TailraceError) as caught:
            world.service.claim(agent, "worker", told)
        assert caught.value.code == "overloaded"
        await world.until(lambda: len(outcomes) == 2)
        assert outcomes == ["NO_PENDING_WORK"] * 2

    run(tmp_path, act)


def test_replies_are_not_lost_when_the_server_stops(tmp_path: Path) -> None:
    async def act(world: World) -> None:
        agent = await world.subscribe(pull())
        outcomes: list[str] = []

        def told(_: Step, error: TailraceError | None) -> None:
            outcomes.append("" if error is None else error.code)

        world.service.add_streams(agent, ["a"], told)
        world.service.claim(agent, "worker", told)
        await world.service.stop()
        await world.until(lambda: len(outcomes) == 2)

    run(tmp_path, act)


def test_stopping_while_a_link_is_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(world: World) -> None:
        agent = await world.subscribe(pull())
        real = world.service.save

        def save(records: Any, done: Callable[[TailraceError | None], None]) -> None:
            real(records, done)
            agent.close(TailraceError("unavailable", "the server is stopping"))

        monkeypatch.setattr(world.service, "save", save)
        await world.create("events/a", 1)
        await world.until(lambda: "events/a" in agent.sub.links)

    run(tmp_path, act)
    assert [record.message for record in caplog.records] == []


def generations(world: World) -> list[int]:
    """What the wake stream says."""
    stream = world.log.existing("wake")
    page = world.log.reader.try_read(stream, 0, 1 << 20, 10_000, None)
    assert isinstance(page, Page), "it is all in memory"
    return [event["generation"] for event in orjson.loads(b"[" + b",".join(page.parts) + b"]")]


def test_a_wake_stream_that_is_made_anew_gets_the_event_again(tmp_path: Path) -> None:
    async def act(world: World) -> None:
        await world.create("wake")
        await world.subscribe(pull())
        await world.create("events/a", 1)
        await world.until(lambda: generations(world) == [1])
        future, told = world.settled()
        world.log.remove(world.log.existing("wake"), "deleted", told, None)
        await future
        await world.create("wake")
        await world.until(lambda: generations(world) == [1])

    run(tmp_path, act)


def test_a_subscription_made_anew_is_heard_though_its_generations_begin_again(tmp_path: Path) -> None:
    async def first(world: World) -> None:
        await world.create("wake")
        agent = await world.subscribe(pull())
        await world.create("events/a", 1)
        await world.until(lambda: generations(world) == [1])
        await world.finish(agent, await world.claim(agent))
        await world.until(lambda: generations(world) == [1, 2])
        future, told = world.settled()
        world.service.delete(agent, told)
        await future
        world.log.put_meta(HEAD_PREFIX + "s", None)  # as after the 30 days of a tombstone

    async def second(world: World) -> None:
        await world.subscribe(pull())
        await world.append("events/a")
        await world.until(lambda: generations(world) == [1, 2, 1])

    run(tmp_path, first, second)


def test_an_event_whose_fate_is_unknown_is_tried_again_and_stands_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "WAKE_EVENT_RETRY_S", 0.01)

    async def act(world: World) -> None:
        await world.create("wake")
        agent = await world.subscribe(pull())
        real, doubts = world.log.append, 0

        def append(stream: Stream, request: AppendRequest, reply: Reply, context: object) -> None:
            """Commits, but says for a while that it does not know."""

            def doubtful(transaction: Transaction, error: TailraceError | None) -> None:
                nonlocal doubts
                doubts += 1
                reply(transaction, APPEND_TIMED_OUT if doubts < 4 else error)

            real(stream, request, doubtful, context)

        await world.create("events/a")
        monkeypatch.setattr(world.log, "append", append)
        real(world.log.existing("events/a"), AppendRequest(b"1", "application/json"), ignore_reply, None)
        await world.until(lambda: agent.announced == 1)
        assert doubts == 4
        assert generations(world) == [1]

    run(tmp_path, act)
