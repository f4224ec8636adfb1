"""What the first worker knows of streams that others own: the tails of those it asked about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from tailrace.cluster.feed import FOLLOW_PATH, INTEREST_PATH, StreamInterest, TailUpdate
from tailrace.http.relay import LineStreamReceiver, PeerClient, build_request, peer_unavailable_error
from tailrace.subscriptions.runner import StreamTail

logger = logging.getLogger("tailrace.workers")

RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 0.5  # whoever makes a subscription waits until all workers are heard
CONNECT_S_MAX: Final = 5.0
PAGE_COUNT: Final = 1000  # names that one request asks for
SILENCE_S_MAX: Final = 30.0  # a worker that tells nothing for so long is away, whatever its socket says


class PeerTails:
    """One worker's streams. While it is away, what was known of them last counts."""

    def __init__(self, peer: PeerClient, mirrors: ClusterTails) -> None:
        self._peer = peer
        self._mirrors = mirrors
        self.tails: dict[str, StreamTail] = {}
        self.up = asyncio.Event()  # everything it was asked about is known
        self._marks: dict[int, asyncio.Future[bool]] = {}  # False: it went away before
        self._last_mark = 0
        self._lines = 0  # heard so far
        self._found: dict[str, StreamTail] | None = None  # while it is told everything again
        self._ended = asyncio.Event()
        self._begun = asyncio.Event()

    async def run(self) -> None:
        pause_s = RETRY_S
        while True:
            self._begun, self._ended = asyncio.Event(), asyncio.Event()
            followed = LineStreamReceiver(self._on_line, self._on_lost)
            self._peer.send(build_request("GET", FOLLOW_PATH, b"", ()), followed)
            try:
                await self._first(self._begun, self._ended)
                if self._begun.is_set():
                    self._found = {}
                    await self.want(*self._mirrors.wanted())
                    self._compare()
                    self.up.set()
                    pause_s = RETRY_S
                    await self._ended.wait()
            except Exception as error:  # noqa: BLE001 - it is tried again
                logger.debug("a worker cannot be followed: %s", error)
            finally:
                self._on_lost()
                if followed.upstream is not None:
                    followed.upstream.abort()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def want(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        """Asks to hear of more, in pages, and returns when all that was so far is known."""
        for start in range(0, len(patterns), PAGE_COUNT):
            await self.mark(patterns=patterns[start : start + PAGE_COUNT])
        for start in range(0, len(names), PAGE_COUNT):
            await self.mark(names=names[start : start + PAGE_COUNT])

    async def mark(self, patterns: Sequence[str] = (), names: Sequence[str] = ()) -> None:
        """Asks to hear of a few more, and returns when all that was so far is known. Raises if it is away."""
        self._last_mark += 1
        mark = self._last_mark
        told = self._marks[mark] = asyncio.get_running_loop().create_future()
        try:
            body = msgspec.json.encode(StreamInterest(mark, list(patterns), list(names)))
            status, _ = await self._peer.ask("POST", INTEREST_PATH, body)
            if status != 204 or not await self._heard_to(told):
                raise peer_unavailable_error()
        finally:
            self._marks.pop(mark, None)

    async def _heard_to(self, told: asyncio.Future[bool]) -> bool:
        """However long it takes, as long as something comes: there may be very many streams to tell of."""
        while not told.done():
            lines = self._lines
            await asyncio.wait((told,), timeout=SILENCE_S_MAX)
            if lines == self._lines and not told.done():
                return False
        return told.result()

    @staticmethod
    async def _first(*events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _on_line(self, line: bytes) -> None:
        self._lines += 1
        news = msgspec.json.decode(line, type=TailUpdate)
        if news.kind == "begun":
            self._begun.set()
        elif news.kind == "marked":
            told = self._marks.get(news.mark)
            if told is not None and not told.done():
                told.set_result(True)
        elif news.kind == "gone":
            self.tails.pop(news.name, None)
            if self._found is not None:
                self._found.pop(news.name, None)
            self._mirrors.on_removed(news.name)
        else:
            self._heard(news)

    def _heard(self, news: TailUpdate) -> None:
        tail = StreamTail(news.offset, news.empty)
        if self._found is not None:
            self._found[news.name] = tail
            return
        self.tails[news.name] = tail
        if news.kind == "created":
            self._mirrors.on_created(news.name)
        elif news.kind == "moved":
            self._mirrors.on_moved(news.name, news.offset)

    def _compare(self) -> None:
        """What changed while nobody listened."""
        found, self._found = self._found or {}, None
        before, self.tails = self.tails, found
        for name in before.keys() - found.keys():
            self._mirrors.on_removed(name)
        for name, tail in found.items():
            if name not in before:
                self._mirrors.on_created(name)
            elif before[name] != tail:
                self._mirrors.on_moved(name, tail.offset)

    def _on_lost(self) -> None:
        self.up.clear()
        self._found = None
        self._ended.set()
        for told in self._marks.values():
            if not told.done():
                told.set_result(False)


class ClusterTails:
    """All other workers."""

    def __init__(
        self,
        peers: Sequence[PeerClient],
        wanted: Callable[[], tuple[list[str], list[str]]],
        on_created: Callable[[str], None],
        on_moved: Callable[[str, str], None],
        on_removed: Callable[[str], None],
    ) -> None:
        self.wanted = wanted
        self.on_created = on_created
        self.on_moved = on_moved
        self.on_removed = on_removed
        self._mirrors = [PeerTails(peer, self) for peer in peers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(mirror.run()) for mirror in self._mirrors]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tail(self, name: str) -> StreamTail | None:
        return next((tail for one in self._mirrors if (tail := one.tails.get(name)) is not None), None)

    def owner(self, name: str) -> int | None:
        """Which of the peers has a stream of this name, as far as is known."""
        return next((index for index, one in enumerate(self._mirrors) if name in one.tails), None)

    def scan(self, prefix: str) -> Iterator[tuple[str, str]]:
        for mirror in self._mirrors:
            for name, tail in list(mirror.tails.items()):
                if name.startswith(prefix) and not name.startswith(("__", "hub/")):
                    yield name, tail.offset

    async def complete(self) -> None:
        """Returns when everything that was asked for is known of all workers, be it in an hour."""
        for mirror in self._mirrors:
            await mirror.up.wait()

    async def want(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        """More to hear of. Raises if one of them is away: it will tell when it is back."""
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await self.complete()
        except TimeoutError:
            raise peer_unavailable_error() from None
        await asyncio.gather(*(mirror.want(patterns, names) for mirror in self._mirrors))

    async def settle(self) -> None:
        """When it returns, what the others did before is known; those that are away did nothing."""
        up = [mirror.mark() for mirror in self._mirrors if mirror.up.is_set()]
        await asyncio.gather(*up, return_exceptions=True)
