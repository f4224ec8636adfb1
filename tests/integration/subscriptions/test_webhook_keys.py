"""Webhook keys over their life: made, announced, used, retired, given up; and whatever crashes in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.hooks import Hook
from tailrace.common.clock import SYSTEM_CLOCK, FakeClock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import DAY_MS
from tailrace.common.settings import Settings
from tailrace.log.log import Log
from tailrace.subscriptions.keys import (
    ANNOUNCED_MS,
    CLOCK_SKEW_MS,
    REPLAY_WINDOW_MS,
    SIGNING_KEYS_RECORD,
    TOKEN_KEY_RECORD,
    ServerKeys,
    StoredWebhookKey,
)

WAIT_S = 60.0
AGE_S = Settings().limits.webhook_key_ms / 1000


@pytest.fixture
def hook() -> Iterator[Hook]:
    receiver = Hook()
    yield receiver
    receiver.close()


class Office:
    """A log, and keys in it, under a clock that the test moves."""

    def __init__(self, directory: Path, clock: FakeClock, since: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.log = Log(directory, Settings().limits, clock, loop)
        self.log.open()
        self.clock = clock
        self.keys = ServerKeys(self.log, clock, loop, Settings(webhook_keys_since=since))

    def kids(self) -> list[str]:
        return [key["kid"] for key in json.loads(self.keys.jwks())["keys"]]

    async def settle(self) -> None:
        await asyncio.wait_for(self.log.committer.drain(), WAIT_S)

    async def rotate_after(self, seconds: float) -> None:
        """The timer's work, at its time."""
        self.clock.advance(seconds)
        self.keys.rotate()
        await self.settle()


def run(directory: Path, clock: FakeClock, act: Callable[[Office], Awaitable[None]], since: str = "") -> None:
    async def live() -> None:
        office = Office(directory, clock, since)
        try:
            office.keys.load()
            await office.settle()
            await act(office)
        finally:
            office.keys.stop()
            await office.log.close()

    asyncio.run(live())


def test_a_rotation_takes_three_steps_and_survives_a_restart_in_each(tmp_path: Path) -> None:
    clock = FakeClock()
    seen: list[list[str]] = []

    async def look(office: Office) -> None:
        seen.append(office.kids())
        assert office.keys.current().kid == seen[-1][0], "the key that signs comes first"

    for wait_s in (0, AGE_S - ANNOUNCED_MS / 1000, ANNOUNCED_MS / 1000, REPLAY_WINDOW_MS / 1000):
        clock.advance(wait_s)
        run(tmp_path, clock, look)
    clock.advance(CLOCK_SKEW_MS / 1000)
    run(tmp_path, clock, look)
    made, announced, switched, retired, forgotten = seen
    (old,) = made
    new = announced[1]
    assert announced == [old, new]
    assert switched == retired == [new, old]
    assert forgotten == [new]


def test_without_restarts_the_same_happens(tmp_path: Path) -> None:
    async def act(office: Office) -> None:
        (old,) = office.kids()
        await office.rotate_after(AGE_S)
        _, new = office.kids()
        assert office.keys.current().kid == old, "nobody has seen the new key yet"
        await office.rotate_after(ANNOUNCED_MS / 1000)
        assert office.kids() == [new, old]
        await office.rotate_after((REPLAY_WINDOW_MS + CLOCK_SKEW_MS) / 1000)
        assert office.kids() == [new]
        saved = msgspec.msgpack.decode(
            office.log.streams.meta[SIGNING_KEYS_RECORD], type=list[StoredWebhookKey]
        )
        assert len(saved) == 1, "the retired key's private half is gone"

    run(tmp_path, FakeClock(), act)


def test_a_key_that_could_not_be_saved_is_not_announced(tmp_path: Path) -> None:
    async def act(office: Office) -> None:
        before = office.kids()
        office.log.refusal = TailraceError("insufficient_storage", "the disk is full")
        await office.rotate_after(AGE_S)
        assert office.kids() == before
        office.log.refusal = None
        await office.rotate_after(5)
        assert len(office.kids()) == 2

    run(tmp_path, FakeClock(), act)


def test_leaked_keys_are_given_up_at_once_and_once_only(tmp_path: Path) -> None:
    clock = FakeClock()
    seen: list[list[str]] = []

    async def look(office: Office) -> None:
        seen.append(office.kids())

    run(tmp_path, clock, look)
    clock.advance(3600)
    for _ in range(2):
        run(tmp_path, clock, look, since="2026-01-01T00:30:00Z")
    first, second, third = seen
    assert len(second) == 1
    assert first != second
    assert second == third


def test_a_server_with_an_old_key_announces_the_next_and_a_crash_changes_nothing(
    tmp_path: Path, start_server: StartServer, hook: Hook
) -> None:
    now_ms = SYSTEM_CLOCK.now_ns() // 1_000_000
    aged = msgspec.msgpack.encode([StoredWebhookKey(bytes(range(32)), now_ms - 91 * DAY_MS)])
    data_dir = tmp_path / "aged"

    async def prepare() -> None:
        log = Log(data_dir, Settings().limits, SYSTEM_CLOCK, asyncio.get_running_loop())
        log.open()
        log.put_metas([(SIGNING_KEYS_RECORD, aged), (TOKEN_KEY_RECORD, bytes(32))])
        await log.close()

    asyncio.run(prepare())
    server = start_server(data_dir=data_dir)
    call = Caller(server)
    jwks = eventually(
        lambda: call("GET", "__ds/jwks.json").raw, lambda raw: len(json.loads(raw)["keys"]) == 2
    )
    old = json.loads(jwks)["keys"][0]["kid"]
    server.restart(kill=True)
    assert call("GET", "__ds/jwks.json").raw == jwks
    config = {"type": "webhook", "pattern": "events/*", "webhook": {"url": hook.url}}
    made = call("PUT", "__ds/subscriptions/s", config)
    assert made.body["webhook"]["signing"]["kid"] == old
    call("PUT", "events/a", [1])
    assert f"kid={old}," in hook.next().headers["webhook-signature"]
