"""Subscriptions over the streams of all workers: tails sent by their owners, mirrored on the first worker.

The first worker follows every other one over one connection (`/_worker/follow`), and names the streams and
patterns it is interested in (`/_worker/interest`). It receives the tails of the existing streams, then a
mark, then every change in order, as lines of JSON. A connection that does not keep up is closed; the first
worker reconnects and receives everything again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from tailrace.cluster.peers import decode_peer_error
from tailrace.common.backoff import Backoff
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.common.tasks import TaskSet, wait_event
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
from tailrace.subscriptions.service import AppendCheck, SubscriptionService
from tailrace.subscriptions.state_machine import Step
from tailrace.subscriptions.webhooks import StartWebhookSpan

FOLLOW_PATH: Final = "/_worker/follow"
INTEREST_PATH: Final = "/_worker/interest"
WAKE_PATH: Final = "/_worker/wake"

UNSENT_BYTES_MAX: Final = 16 * 1024 * 1024
SHOWN_BYTES_MAX: Final = 1024 * 1024  # of existing streams; the rest is for changes
SCAN_PAGE: Final = 500


class StreamInterest(msgspec.Struct, frozen=True):
    """Streams to follow from now on, in addition to earlier ones."""

    mark: int
    patterns: list[str] = []
    names: list[str] = []


class TailUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One line. `found`, `created` and `moved` streams have a tail; others are `gone`.

    `begun` is the first line, `marked` follows the existing streams of an interest.
    """

    kind: str
    name: str = ""
    offset: str = ""
    empty: bool = False
    mark: int = 0


class WakeAppend(msgspec.Struct, frozen=True):
    """An event for a wake stream; the producer makes repeats harmless."""

    stream: str
    body: bytes
    producer: str
    generation: int


class TailFeed:
    """Sends the tails of this worker's streams to the first worker; on every worker but the first."""

    def __init__(self, log: Log, loop: asyncio.AbstractEventLoop, check: AppendCheck) -> None:
        self._log = log
        self._loop = loop
        self._check = check
        self._outlet: ResponseStream | None = None
        self._patterns: list[NamePattern] = []
        self._names: set[str] = set()
        # Updates of this iteration of the event loop; a stream that moved several times has one update.
        self._queued: list[tuple[str, str, Stream | int]] = []
        self._moved: set[str] = set()
        self._tasks = TaskSet()
        self._drained = asyncio.Event()

    # -- requests of the first worker --------------------------------------------------------------------

    def follow(self, exchange: Exchange) -> None:
        """Start a new feed, which replaces an earlier one and its interests."""
        self.end()
        self._patterns, self._names = [], set()
        self._queued.clear()
        self._moved.clear()
        self._outlet = outlet = exchange.open_stream(200, b"Content-Type: application/x-ndjson\r\n")
        outlet.on_gone = lambda: self._gone(outlet)
        outlet.on_drain = self._drained.set
        self._log.publisher.observers.append(self)
        outlet.write(_encode_line(TailUpdate("begun")))

    def interest(self, exchange: Exchange) -> None:
        if self._outlet is None:
            raise TailraceError("unavailable", "there is no feed connection")
        interest = msgspec.json.decode(exchange.body, type=StreamInterest)
        patterns = [NamePattern(text) for text in interest.patterns]
        known = {pattern.text for pattern in self._patterns}
        self._patterns += [pattern for pattern in patterns if pattern.text not in known]
        self._names.update(interest.names)
        exchange.respond(204)
        if patterns or interest.names:
            self._tasks.start(self._send_existing(patterns, interest))
        else:
            self._queue("marked", "", interest.mark)

    def wake(self, exchange: Exchange) -> None:
        """Append the event of a wake, validated as any other append."""
        wake = msgspec.json.decode(exchange.body, type=WakeAppend)
        producer = (wake.producer, wake.generation, 0)
        request = AppendRequest(wake.body, "application/json", producer=producer)
        request.check = self._check

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if error is None:
                exchange.respond(204)
            else:
                responses.respond_error(exchange, error)

        self._log.append(self._log.existing(wake.stream), request, reply, None)

    def end(self) -> None:
        outlet, self._outlet = self._outlet, None
        self._drained.set()
        if outlet is not None:
            self._log.publisher.observers.remove(self)
            outlet.end()

    def _gone(self, outlet: ResponseStream) -> None:
        if outlet is self._outlet:
            self.end()

    # -- called by the log -------------------------------------------------------------------------------

    def on_created(self, stream: Stream) -> None:
        if self._is_subscribed(stream.name):
            self._queue("created", stream.name, stream)

    def on_published(self, stream: Stream) -> None:
        if stream.name not in self._moved and self._is_subscribed(stream.name):
            self._moved.add(stream.name)
            self._queue("moved", stream.name, stream)

    def on_removed(self, stream: Stream) -> None:
        if self._is_subscribed(stream.name):
            self._moved.discard(stream.name)
            self._queue("gone", stream.name, 0)

    def _is_subscribed(self, name: str) -> bool:
        return name in self._names or any(pattern.matches(name) for pattern in self._patterns)

    # -- internal ----------------------------------------------------------------------------------------

    async def _send_existing(self, patterns: list[NamePattern], interest: StreamInterest) -> None:
        """Send the existing streams, page by page; changes are sent in between."""
        outlet = self._outlet
        for page in self._pages(patterns, interest.names):
            for stream in page:
                self._queue("found", stream.name, stream)
            await asyncio.sleep(0)
            if outlet is not None and outlet.unsent_bytes > SHOWN_BYTES_MAX:
                self._drained.clear()
                await self._drained.wait()
            if outlet is not self._outlet:
                return  # there is a new feed connection, with its own interests
        self._queue("marked", "", interest.mark)

    def _pages(self, patterns: list[NamePattern], names: list[str]) -> Iterator[list[Stream]]:
        for pattern in patterns:
            after = ""
            while page := list_streams(self._log, after, pattern.prefix, SCAN_PAGE, system=False):
                yield [stream for stream in page if pattern.matches(stream.name)]
                after = page[-1].name
        for start in range(0, len(names), SCAN_PAGE):
            found = [self._log.find(name) for name in names[start : start + SCAN_PAGE]]
            yield [one for one in found if one is not None and not one.gone and one.visible >= 0]

    def _queue(self, kind: str, name: str, subject: Stream | int) -> None:
        if not self._queued:
            self._loop.call_soon(self._flush)
        self._queued.append((kind, name, subject))

    def _flush(self) -> None:
        queued, self._queued = self._queued, []
        self._moved.clear()
        outlet = self._outlet
        if outlet is None:
            return
        lines: list[bytes] = []
        for kind, name, subject in queued:
            if isinstance(subject, int):
                lines.append(_encode_line(TailUpdate(kind, name, mark=subject)))
            else:
                offset = subject.offset(subject.visible)
                lines.append(_encode_line(TailUpdate(kind, name, offset, subject.visible == 0)))
        outlet.write(b"".join(lines))
        if outlet.unsent_bytes > UNSENT_BYTES_MAX:
            self.end()  # the first worker reconnects and receives everything again


def _encode_line(update: TailUpdate) -> bytes:
    return msgspec.json.encode(update) + b"\n"


logger = logging.getLogger("tailrace.workers")

RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 0.5  # requests that create a subscription wait for all workers
CONNECT_S_MAX: Final = 5.0
PAGE_COUNT: Final = 1000  # names in one request
SILENCE_S_MAX: Final = 30.0  # a worker that sends nothing for this long is unavailable


class PeerTails:
    """The tails of one worker's streams; while it is unavailable, the last known ones."""

    def __init__(self, peer: PeerClient, cluster: ClusterTails) -> None:
        self._peer = peer
        self._peer_tails = cluster
        self.tails: dict[str, StreamTail] = {}
        self.up = asyncio.Event()  # all subscribed streams are known
        self._marks: dict[int, asyncio.Future[bool]] = {}  # False: the connection was lost before the mark
        self._last_mark = 0
        self._lines_received = 0
        self._found: dict[str, StreamTail] | None = None  # the snapshot being received after a reconnect
        self._ended = asyncio.Event()
        self._begun = asyncio.Event()

    async def run(self) -> None:
        backoff = Backoff(RETRY_S, RETRY_S_MAX)
        while True:
            self._begun, self._ended = asyncio.Event(), asyncio.Event()
            followed = LineStreamReceiver(self._on_line, self._on_lost)
            self._peer.send(build_request("GET", FOLLOW_PATH, b"", ()), followed)
            try:
                await self._wait_any(self._begun, self._ended)
                if self._begun.is_set():
                    self._found = {}
                    await self.subscribe(*self._peer_tails.interest())
                    self._apply_snapshot()
                    self.up.set()
                    backoff.reset()
                    await self._ended.wait()
            except Exception as error:  # noqa: BLE001 - retried
                logger.debug("cannot follow worker, retrying", extra=log_fields(error=str(error)))
            finally:
                self._on_lost()
                if followed.upstream is not None:
                    followed.upstream.abort()
            await asyncio.sleep(backoff.next_s())

    async def subscribe(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        """Subscribe to more streams, in pages, and return when the existing ones are known."""
        for start in range(0, len(patterns), PAGE_COUNT):
            await self.mark(patterns=patterns[start : start + PAGE_COUNT])
        for start in range(0, len(names), PAGE_COUNT):
            await self.mark(names=names[start : start + PAGE_COUNT])

    async def mark(self, patterns: Sequence[str] = (), names: Sequence[str] = ()) -> None:
        """Subscribe to a page of streams, and return when all earlier changes are known.

        Raises if the worker is unavailable.
        """
        self._last_mark += 1
        mark = self._last_mark
        marked = self._marks[mark] = asyncio.get_running_loop().create_future()
        try:
            body = msgspec.json.encode(StreamInterest(mark, list(patterns), list(names)))
            status, _ = await self._peer.ask("POST", INTEREST_PATH, body)
            if status != 204 or not await self._await_mark(marked):
                raise peer_unavailable_error()
        finally:
            self._marks.pop(mark, None)

    async def _await_mark(self, marked: asyncio.Future[bool]) -> bool:
        """Wait for a mark as long as lines arrive: there may be very many streams before it."""
        while not marked.done():
            lines = self._lines_received
            await asyncio.wait((marked,), timeout=SILENCE_S_MAX)
            if lines == self._lines_received and not marked.done():
                return False
        return marked.result()

    @staticmethod
    async def _wait_any(*events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _on_line(self, line: bytes) -> None:
        self._lines_received += 1
        update = msgspec.json.decode(line, type=TailUpdate)
        if update.kind == "begun":
            self._begun.set()
        elif update.kind == "marked":
            marked = self._marks.get(update.mark)
            if marked is not None and not marked.done():
                marked.set_result(True)
        elif update.kind == "gone":
            self.tails.pop(update.name, None)
            if self._found is not None:
                self._found.pop(update.name, None)
            self._peer_tails.on_removed(update.name)
        else:
            self._on_tail(update)

    def _on_tail(self, update: TailUpdate) -> None:
        tail = StreamTail(update.offset, update.empty)
        if self._found is not None:
            self._found[update.name] = tail
            return
        self.tails[update.name] = tail
        if update.kind == "created":
            self._peer_tails.on_created(update.name)
        elif update.kind == "moved":
            self._peer_tails.on_moved(update.name, update.offset)

    def _apply_snapshot(self) -> None:
        """Report what changed while the worker was not followed."""
        found, self._found = self._found or {}, None
        before, self.tails = self.tails, found
        for name in before.keys() - found.keys():
            self._peer_tails.on_removed(name)
        for name, tail in found.items():
            if name not in before:
                self._peer_tails.on_created(name)
            elif before[name] != tail:
                self._peer_tails.on_moved(name, tail.offset)

    def _on_lost(self) -> None:
        self.up.clear()
        self._found = None
        self._ended.set()
        for marked in self._marks.values():
            if not marked.done():
                marked.set_result(False)


class ClusterTails:
    """The tails of the streams of all other workers."""

    def __init__(
        self,
        peers: Sequence[PeerClient],
        interest: Callable[[], tuple[list[str], list[str]]],
        on_created: Callable[[str], None],
        on_moved: Callable[[str, str], None],
        on_removed: Callable[[str], None],
    ) -> None:
        self.interest = interest
        self.on_created = on_created
        self.on_moved = on_moved
        self.on_removed = on_removed
        self._peer_tails = [PeerTails(peer, self) for peer in peers]
        self._tasks = TaskSet()

    def start(self) -> None:
        for tails in self._peer_tails:
            self._tasks.start(tails.run())

    async def stop(self) -> None:
        await self._tasks.close()

    def tail(self, name: str) -> StreamTail | None:
        return next((tail for one in self._peer_tails if (tail := one.tails.get(name)) is not None), None)

    def owner(self, name: str) -> int | None:
        """The index of the peer that has a stream of this name, as far as is known."""
        return next((index for index, one in enumerate(self._peer_tails) if name in one.tails), None)

    def scan(self, prefix: str) -> Iterator[tuple[str, str]]:
        for tails in self._peer_tails:
            for name, tail in list(tails.tails.items()):
                if name.startswith(prefix) and not name.startswith(("__", "hub/")):
                    yield name, tail.offset

    async def complete(self) -> None:
        """Wait until all subscribed streams of all workers are known."""
        for tails in self._peer_tails:
            await tails.up.wait()

    async def subscribe(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        """Subscribe to more streams. Raises if a worker is unavailable; it gets them when it reconnects."""
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await self.complete()
        except TimeoutError:
            raise peer_unavailable_error() from None
        await asyncio.gather(*(tails.subscribe(patterns, names) for tails in self._peer_tails))

    async def synchronise(self) -> None:
        """Wait until all earlier changes of the other workers are known, except for unavailable ones."""
        up = [tails.mark() for tails in self._peer_tails if tails.up.is_set()]
        await asyncio.gather(*up, return_exceptions=True)


START_S_MAX: Final = 5.0


class ClusterSubscriptions(SubscriptionService):
    """The subscription service of the first worker, with the tails of streams that other workers own."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        telemetry: ServerMetrics,
        check: AppendCheck,
        trace: StartWebhookSpan | None,
        peers: Sequence[PeerClient],
    ) -> None:
        super().__init__(log, settings, clock, loop, telemetry, check, trace)
        self._peers = peers
        self._event_loop = loop
        self._peer_tails = ClusterTails(peers, self._interest, self.created, self.moved, self.removed)
        # Subscribed patterns and paths. They are not counted: a name stays here until the worker restarts.
        self._patterns: set[str] = set()
        self._paths: set[str] = set()
        self._started = asyncio.Event()
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Start existing subscriptions when the streams of all workers are known: a link to a stream that is
        not known yet would look like one to a deleted stream.
        """
        found, _ = decode_subscriptions(self._log.streams.meta.items())
        for sub in found.values():
            if not sub.deleted:
                # Links made by the pattern are covered by it.
                self._add_interest(sub.config, (path for path, link in sub.links.items() if not link.glob))
        self._peer_tails.start()
        self._tasks.start(self._start_service())

    async def _start_service(self) -> None:
        if self._patterns or self._paths:
            await self._peer_tails.complete()
        await super().start()
        self._started.set()

    async def stop(self) -> None:
        await self._tasks.close()
        await self._peer_tails.stop()
        await super().stop()

    async def synchronise(self) -> None:
        """Before a request is handled: wait until all that its client saw on any worker is known here."""
        if not await wait_event(self._started, START_S_MAX):
            raise TailraceError("unavailable", "the streams of some workers are not known yet")
        await self._peer_tails.synchronise()

    # -- overrides ---------------------------------------------------------------------------------------

    def tail(self, path: str) -> StreamTail | None:
        return super().tail(path) or self._peer_tails.tail(path)

    def scan(self, prefix: str) -> Iterator[list[tuple[str, str]]]:
        yield from super().scan(prefix)
        yield list(self._peer_tails.scan(prefix))

    async def wait_for_streams(self, config: SubscriptionConfig) -> None:
        patterns, paths = self._add_interest(config, ())
        await self._peer_tails.subscribe(patterns, paths)

    def add_streams(self, runner: SubscriptionRunner, paths: Sequence[str], callback: StepCallback) -> None:
        self._paths.update(paths)

        async def add() -> None:
            try:
                await self._peer_tails.subscribe([], paths)
            except TailraceError as error:
                callback(Step(), error)
            else:
                super(ClusterSubscriptions, self).add_streams(runner, paths, callback)

        self._tasks.start(add())

    def write_wake(
        self, name: str, body: bytes, producer: tuple[str, int, int], written: SavedCallback
    ) -> None:
        owner = self._peer_tails.owner(name)
        if owner is None:
            super().write_wake(name, body, producer, written)
            return
        request = msgspec.json.encode(WakeAppend(name, body, producer[0], producer[1]))
        self._tasks.start(self._write_remote_wake(self._peers[owner], request, written))

    async def _write_remote_wake(self, peer: PeerClient, request: bytes, written: SavedCallback) -> None:
        try:
            status, body = await peer.ask("POST", WAKE_PATH, request)
        except TailraceError as error:
            written(error)
            return
        written(None if status == 204 else decode_peer_error(body))

    # -- internal ----------------------------------------------------------------------------------------

    def _add_interest(self, config: SubscriptionConfig, links: Iterable[str]) -> tuple[list[str], list[str]]:
        patterns = [] if config.pattern is None else [config.pattern]
        paths = [*config.streams, *links]
        if config.wake_stream is not None:
            paths.append(config.wake_stream)
        self._patterns.update(patterns)
        self._paths.update(paths)
        return patterns, paths

    def _interest(self) -> tuple[list[str], list[str]]:
        return sorted(self._patterns), sorted(self._paths)
