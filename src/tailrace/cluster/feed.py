"""What happens to the streams of one worker, told to the first: subscriptions look at the streams of all.

The first worker follows every other over one connection, and says which names it wants to hear of. It gets
what there is of them, then a mark, then every change in order. A reader that is too slow is cut off; it comes
back and is told everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange, ResponseStream
from tailrace.log.decide import AppendRequest
from tailrace.log.listing import list_streams
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.protocol.stream_names import NamePattern
from tailrace.routing import responses

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
