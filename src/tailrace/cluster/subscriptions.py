"""Subscriptions over the streams of all workers: kept by the first, told by the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from tailrace.cluster.feed import WAKE_PATH, WakeAppend
from tailrace.cluster.mirror import ClusterTails
from tailrace.cluster.refusals import decode_peer_error
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.http.relay import PeerClient
from tailrace.log.log import Log
from tailrace.subscriptions.model import SubscriptionConfig, decode_subscriptions
from tailrace.subscriptions.runner import SavedCallback, StepCallback, StreamTail, SubscriptionRunner
from tailrace.subscriptions.service import SubscriptionService
from tailrace.subscriptions.state_machine import Step

START_S_MAX: Final = 5.0


class ClusterSubscriptions(SubscriptionService):
    """As the service of a single process, with a mirror of the streams that others own."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        telemetry: ServerMetrics,
        peers: Sequence[PeerClient],
    ) -> None:
        super().__init__(log, settings, clock, loop, telemetry)
        self._peers = peers
        self._spread_loop = loop
        self._mirrors = ClusterTails(peers, self._wanted, self.created, self.moved, self.removed)
        # What is asked for, counted by nobody: a name stays here until the worker starts again.
        self._patterns: set[str] = set()
        self._paths: set[str] = set()
        self._started = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscriptions that exist are taken up when all workers have been heard: a link to a stream that
        nobody has told of yet would look like one to a stream that is gone."""
        found, _ = decode_subscriptions(self._log.streams.meta.items())
        for sub in found.values():
            if not sub.deleted:
                # Those that the pattern linked are heard of by the pattern.
                self._want(sub.config, (path for path, link in sub.links.items() if not link.glob))
        self._mirrors.start()
        self._spawn(self._take_up())

    async def _take_up(self) -> None:
        if self._patterns or self._paths:
            await self._mirrors.complete()
        await super().start()
        self._started.set()

    async def stop(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._mirrors.stop()
        await super().stop()

    async def settle(self) -> None:
        """Before a request is looked at: what its sender saw on any worker is known here."""
        try:
            async with asyncio.timeout(START_S_MAX):
                await self._started.wait()
        except TimeoutError:
            raise TailraceError("unavailable", "not all workers have been heard yet") from None
        await self._mirrors.settle()

    # -- what the service asks ---------------------------------------------------------------------------

    def tail(self, path: str) -> StreamTail | None:
        return super().tail(path) or self._mirrors.tail(path)

    def scan(self, prefix: str) -> Iterator[list[tuple[str, str]]]:
        yield from super().scan(prefix)
        yield list(self._mirrors.scan(prefix))

    async def hear_of(self, config: SubscriptionConfig) -> None:
        patterns, paths = self._want(config, ())
        await self._mirrors.want(patterns, paths)

    def add_streams(self, agent: SubscriptionRunner, paths: Sequence[str], told: StepCallback) -> None:
        self._paths.update(paths)

        async def add() -> None:
            try:
                await self._mirrors.want([], paths)
            except TailraceError as error:
                told(Step(), error)
            else:
                super(ClusterSubscriptions, self).add_streams(agent, paths, told)

        self._spawn(add())

    def write_wake(
        self, name: str, body: bytes, producer: tuple[str, int, int], written: SavedCallback
    ) -> None:
        owner = self._mirrors.owner(name)
        if owner is None:
            super().write_wake(name, body, producer, written)
            return
        asked = msgspec.json.encode(WakeAppend(name, body, producer[0], producer[1]))
        self._spawn(self._write_there(self._peers[owner], asked, written))

    async def _write_there(self, peer: PeerClient, asked: bytes, written: SavedCallback) -> None:
        try:
            status, answer = await peer.ask("POST", WAKE_PATH, asked)
        except TailraceError as error:
            written(error)
            return
        written(None if status == 204 else decode_peer_error(answer))

    # -- inside ------------------------------------------------------------------------------------------

    def _want(self, config: SubscriptionConfig, links: Iterable[str]) -> tuple[list[str], list[str]]:
        patterns = [] if config.pattern is None else [config.pattern]
        paths = [*config.streams, *links]
        if config.wake_stream is not None:
            paths.append(config.wake_stream)
        self._patterns.update(patterns)
        self._paths.update(paths)
        return patterns, paths

    def _wanted(self) -> tuple[list[str], list[str]]:
        return sorted(self._patterns), sorted(self._paths)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._spread_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
