"""Subscriptions over the streams of all workers: tails sent by their owners, mirrored on the first worker.

What happens to the streams of one worker, told to the first: subscriptions look at the streams of all.

The first worker follows every other over one connection, and says which names it wants to hear of. It gets
what there is of them, then a mark, then every change in order. A reader that is too slow is cut off; it comes
back and is told everything again.

What the first worker knows of streams that others own: the tails of those it asked about.

Subscriptions over the streams of all workers: kept by the first, told by the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from tailrace.cluster.peers import decode_peer_error
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.http.exchange import Exchange, ResponseStream
from tailrace.http.relay import LineStreamReceiver, PeerClient, build_request, peer_unavailable_error
from tailrace.log.decide import AppendRequest
from tailrace.log.listing import list_streams
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.protocol.stream_names import NamePattern
from tailrace.routing import responses
from tailrace.subscriptions.model import SubscriptionConfig, decode_subscriptions
from tailrace.subscriptions.runner import SavedCallback, StepCallback, StreamTail, SubscriptionRunner
from tailrace.subscriptions.service import SubscriptionService
from tailrace.subscriptions.state_machine import Step

FOLLOW_PATH: Final = "/_worker/follow"
INTEREST_PATH: Final = "/_worker/interest"
WAKE_PATH: Final = "/_worker/wake"
AppendCheck = Callable[[AppendRequest, Stream], Sequence[bytes | None] | None]

UNSENT_BYTES_MAX: Final = 16 * 1024 * 1024
SHOWN_BYTES_MAX: Final = 1024 * 1024  # of what there is; what happens has the rest
SCAN_PAGE: Final = 500


class StreamInterest(msgspec.Struct, frozen=True):
    """Streams to hear of from now on, besides those of before."""

    mark: int
    patterns: list[str] = []
    names: list[str] = []


class TailUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One line. `found` and `created` streams have a tail, as have those that `moved`; others are `gone`.

    `begun` is the first line, `marked` comes when all that an interest asks for has been told.
    """

    kind: str
    name: str = ""
    offset: str = ""
    empty: bool = False
    mark: int = 0


class WakeAppend(msgspec.Struct, frozen=True):
    """An event for a wake stream, written once however often it is sent."""

    stream: str
    body: bytes
    producer: str
    generation: int


class TailFeed:
    """On every worker but the first."""

    def __init__(self, log: Log, loop: asyncio.AbstractEventLoop, check: AppendCheck) -> None:
        self._log = log
        self._loop = loop
        self._check = check
        self._outlet: ResponseStream | None = None
        self._patterns: list[NamePattern] = []
        self._names: set[str] = set()
        # What has happened in this turn of the loop. A stream that moved often is told once, where it is.
        self._happened: list[tuple[str, str, Stream | int]] = []
        self._moved: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()

    # -- questions of the first worker -------------------------------------------------------------------

    def follow(self, exchange: Exchange) -> None:
        """Begins anew: whoever followed before is gone, and with it what it wanted."""
        self.end()
        self._patterns, self._names = [], set()
        self._happened.clear()
        self._moved.clear()
        self._outlet = outlet = exchange.open_stream(200, b"Content-Type: application/x-ndjson\r\n")
        outlet.on_gone = lambda: self._gone(outlet)
        outlet.on_drain = self._drained.set
        self._log.publisher.observers.append(self)
        outlet.write(_encode_line(TailUpdate("begun")))

    def interest(self, exchange: Exchange) -> None:
        if self._outlet is None:
            raise TailraceError("unavailable", "nobody follows")
        wanted = msgspec.json.decode(exchange.body, type=StreamInterest)
        patterns = [NamePattern(text) for text in wanted.patterns]
        known = {pattern.text for pattern in self._patterns}
        self._patterns += [pattern for pattern in patterns if pattern.text not in known]
        self._names.update(wanted.names)
        exchange.respond(204)
        if patterns or wanted.names:
            task = self._loop.create_task(self._show(patterns, wanted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._happen("marked", "", wanted.mark)

    def wake(self, exchange: Exchange) -> None:
        """Appends the event of a wake; what the stream's schema says holds for it as for everybody."""
        asked = msgspec.json.decode(exchange.body, type=WakeAppend)
        producer = (asked.producer, asked.generation, 0)
        request = AppendRequest(asked.body, "application/json", producer=producer)
        request.check = self._check

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if error is None:
                exchange.respond(204)
            else:
                responses.respond_error(exchange, error)

        self._log.append(self._log.existing(asked.stream), request, reply, None)

    def end(self) -> None:
        outlet, self._outlet = self._outlet, None
        self._drained.set()
        if outlet is not None:
            self._log.publisher.observers.remove(self)
            outlet.end()

    def _gone(self, outlet: ResponseStream) -> None:
        if outlet is self._outlet:
            self.end()

    # -- what the log tells ------------------------------------------------------------------------------

    def on_created(self, stream: Stream) -> None:
        if self._is_wanted(stream.name):
            self._happen("created", stream.name, stream)

    def on_published(self, stream: Stream) -> None:
        if stream.name not in self._moved and self._is_wanted(stream.name):
            self._moved.add(stream.name)
            self._happen("moved", stream.name, stream)

    def on_removed(self, stream: Stream) -> None:
        if self._is_wanted(stream.name):
            self._moved.discard(stream.name)
            self._happen("gone", stream.name, 0)

    def _is_wanted(self, name: str) -> bool:
        return name in self._names or any(pattern.matches(name) for pattern in self._patterns)

    # -- inside ------------------------------------------------------------------------------------------

    async def _show(self, patterns: list[NamePattern], wanted: StreamInterest) -> None:
        """What there is, page by page: appends go on meanwhile, and so does what is told of them."""
        outlet = self._outlet
        for page in self._pages(patterns, wanted.names):
            for stream in page:
                self._happen("found", stream.name, stream)
            await asyncio.sleep(0)
            if outlet is not None and outlet.unsent_bytes > SHOWN_BYTES_MAX:
                self._drained.clear()
                await self._drained.wait()
            if outlet is not self._outlet:
                return  # somebody else follows by now, and has asked anew
        self._happen("marked", "", wanted.mark)

    def _pages(self, patterns: list[NamePattern], names: list[str]) -> Iterator[list[Stream]]:
        for pattern in patterns:
            after = ""
            while page := list_streams(self._log, after, pattern.prefix, SCAN_PAGE, system=False):
                yield [stream for stream in page if pattern.matches(stream.name)]
                after = page[-1].name
        for start in range(0, len(names), SCAN_PAGE):
            found = [self._log.find(name) for name in names[start : start + SCAN_PAGE]]
            yield [one for one in found if one is not None and not one.gone and one.visible >= 0]

    def _happen(self, kind: str, name: str, subject: Stream | int) -> None:
        if not self._happened:
            self._loop.call_soon(self._flush)
        self._happened.append((kind, name, subject))

    def _flush(self) -> None:
        happened, self._happened = self._happened, []
        self._moved.clear()
        outlet = self._outlet
        if outlet is None:
            return
        lines: list[bytes] = []
        for kind, name, subject in happened:
            if isinstance(subject, int):
                lines.append(_encode_line(TailUpdate(kind, name, mark=subject)))
            else:
                offset = subject.offset(subject.visible)
                lines.append(_encode_line(TailUpdate(kind, name, offset, subject.visible == 0)))
        outlet.write(b"".join(lines))
        if outlet.unsent_bytes > UNSENT_BYTES_MAX:
            self.end()  # it comes back, and hears everything again


def _encode_line(news: TailUpdate) -> bytes:
    return msgspec.json.encode(news) + b"\n"


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

    async def wait_for_streams(self, config: SubscriptionConfig) -> None:
        patterns, paths = self._want(config, ())
        await self._mirrors.want(patterns, paths)

    def add_streams(self, runner: SubscriptionRunner, paths: Sequence[str], callback: StepCallback) -> None:
        self._paths.update(paths)

        async def add() -> None:
            try:
                await self._mirrors.want([], paths)
            except TailraceError as error:
                callback(Step(), error)
            else:
                super(ClusterSubscriptions, self).add_streams(runner, paths, callback)

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
