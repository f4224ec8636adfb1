"""Following a stream by long-poll or server-sent events, resumed after failures.

A follower catches up with plain reads, then reads live, and continues from the last position after a failure.
A page is returned only with the position after it, and the position moves only when a page is returned, so
nothing is skipped or repeated. Payloads stay bytes from the socket to the caller: decoding would cost time
and change what is not valid UTF-8.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.client import wire
from tailrace.client.errors import CONNECT_FAILED, CONNECTION_LOST, INVALID_ANSWER, ClientError, check_seconds
from tailrace.client.model import Page, is_json
from tailrace.client.transport import (
    Backoff,
    BrokenConnectionError,
    CloseStream,
    Retries,
    Sleep,
    Steps,
    may_retry,
    next_chunk,
    open_stream,
    retry_after_s,
    send_request,
    with_stream_name,
)

# One event holds at most one read page; in the worst case one entry of 64 MiB that consists of line ends.
EVENT_BYTES_MAX = 400 * 1024 * 1024


class ServerSentEvent(msgspec.Struct, frozen=True):
    """One dispatched event."""

    name: bytes
    data: bytes


class EventTooLargeError(ValueError):
    """An event exceeded `EVENT_BYTES_MAX`."""


class EventParser:
    """Parses server-sent events from chunks split anywhere; `feed` returns the completed events."""

    __slots__ = ("_data", "_name", "_partial", "_partial_bytes", "_size", "_skip_lf")

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._skip_lf = False
        self._name = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        if self._skip_lf and chunk[:1] == b"\n":
            # The CR that ended the last line was the first half of a CRLF.
            chunk = chunk[1:]
            self._skip_lf = False
        if not chunk:
            return []
        self._skip_lf = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *lines = chunk.split(b"\n")
        self._partial.append(first)
        self._partial_bytes += len(first)
        if self._size + self._partial_bytes > EVENT_BYTES_MAX:
            raise EventTooLargeError(f"a server-sent event exceeds {EVENT_BYTES_MAX} bytes")
        if not lines:
            return []
        complete = [b"".join(self._partial), *lines[:-1]]
        self._partial = [lines[-1]]
        self._partial_bytes = len(lines[-1])
        return [event for line in complete if (event := self._parse_line(line)) is not None]

    def _parse_line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            event = ServerSentEvent(self._name or b"message", b"\n".join(self._data)) if self._data else None
            self._name = b""
            self._data = []
            self._size = 0
            return event
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            self._data.append(value)
            self._size += len(value)
        elif field == b"event":
            self._name = value
        # Comments (an empty field name), `id` and `retry` are not used.
        return None


Mode = Literal["long-poll", "sse"]

# Longest silence of a server during a poll or on an event stream before it counts as disconnected. Event
# streams have a keep-alive every 15 s, idle polls return within 5 s unless configured longer.
IDLE_S_MAX = 45.0
ATTEMPTS_UNLIMITED = 2**62


class Follower:
    """The position of one reader, and how it advances."""

    __slots__ = (
        "_backoff",
        "_base64",
        "_catching_up",
        "_connected_once",
        "_content_type",
        "_cursor",
        "_data",
        "_fresh",
        "_give_up_s",
        "_mode",
        "_open",
        "_options",
        "_parser",
        "_pending",
        "_retries",
        "closed",
        "name",
        "offset",
        "up_to_date",
    )

    def __init__(
        self,
        name: str,
        *,
        offset: str,
        mode: Mode,
        retries: Retries,
        options: wire.ReadOptions | None = None,
        give_up_s: float | None = None,
    ) -> None:
        if mode not in ("long-poll", "sse"):
            raise ValueError(f"mode must be 'long-poll' or 'sse', not {mode!r}")
        if give_up_s is not None:
            check_seconds("give_up_s", give_up_s, may_be_zero=True)
        options = options or {}
        if mode == "sse" and options.get("filter") is not None:
            raise ValueError("a filter requires the mode 'long-poll'")
        self.offset: str = offset
        self.up_to_date = False
        self.closed = False
        self.name = name
        self._mode = mode
        self._options = options
        self._retries = retries
        self._give_up_s = give_up_s
        self._backoff = Backoff(retries)
        self._connected_once = False
        self._catching_up = True
        self._cursor: str | None = None
        self._content_type = ""
        self._open = False
        self._base64 = False
        self._fresh = False
        self._parser = EventParser()
        self._data: bytes | None = None
        self._pending: list[tuple[bytes | None, bytes]] = []

    @with_stream_name
    def advance(self) -> Steps[Page | None]:
        """The next page with content, or None once the stream is closed and was returned completely."""
        while not self.closed:
            try:
                page = yield from self._next_page()
            except BrokenConnectionError as broken:
                delay = self._backoff.next_delay()
                if delay is None:
                    yield CloseStream()
                    code = CONNECTION_LOST if broken.sent else CONNECT_FAILED
                    raise ClientError(code, f"following {self.name} failed: {broken}") from broken
                yield from self._restart(delay)
                continue
            except ClientError as error:
                delay = self._delay_after(error)
                if delay is None:
                    yield CloseStream()
                    raise
                yield from self._restart(delay)
                continue
            if page is not None:
                self._accept(page)
                if not page.is_empty:
                    return page
        yield CloseStream()
        return None

    def _accept(self, page: Page) -> None:
        self.offset = page.next_offset
        self.up_to_date = page.up_to_date
        self.closed = page.closed
        self._options = wire.continued_options(self._options)
        self._cursor = page.cursor or self._cursor
        if self._connected_once:
            self._backoff.reset()
            return
        # The first request has the usual retries, so that a wrong address fails. After it the follower
        # survives restarts of the server, for as long as the caller wants.
        self._connected_once = True
        give_up_s = float("inf") if self._give_up_s is None else self._give_up_s
        self._backoff = Backoff(self._retries, attempts_max=ATTEMPTS_UNLIMITED, elapsed_s_max=give_up_s)

    def _delay_after(self, error: ClientError) -> float | None:
        """How long to wait after a temporary error; None for a permanent one."""
        if not may_retry(error.status, repeatable=True):
            return None
        return self._backoff.next_delay(retry_after_s(error.answer_headers))

    def _restart(self, delay: float) -> Steps[None]:
        yield from self._disconnect()
        yield Sleep(delay)

    def _disconnect(self) -> Steps[None]:
        self._open = False
        self._catching_up = True
        self._pending.clear()
        yield CloseStream()

    def _next_page(self) -> Steps[Page | None]:
        if self._catching_up:
            page = yield from self._catch_up()
        elif self._mode == "long-poll":
            page = yield from self._poll()
        else:
            page = yield from self._listen()
        return page

    def _catch_up(self) -> Steps[Page]:
        # Also the start of every live connection: it turns `now`, `-1` and `since` into a position that
        # survives a reconnect, and returns the content type, which an event stream does not.
        offset = None if self._options.get("since") is not None else self.offset
        response = yield from send_request(wire.read(self.name, offset=offset, **self._options))
        wire.check_status(response, 200)
        page = wire.parse_page(response)
        self._content_type = page.content_type
        self._catching_up = not page.up_to_date
        return page

    def _poll(self) -> Steps[Page]:
        response = yield from send_request(
            wire.read(
                self.name,
                offset=self.offset,
                live="long-poll",
                cursor=self._cursor,
                wait_s=IDLE_S_MAX,
                **wire.continued_options(self._options),
            )
        )
        wire.check_status(response, 200, 204)
        return wire.parse_page(response)

    def _listen(self) -> Steps[Page | None]:
        """The next page of the event stream; None if it ended and must be opened again."""
        if not self._open:
            yield from self._connect()
        while not self._pending:
            chunk = yield from next_chunk()
            if chunk is None:
                # A regular end: the server rotates connections. Without any event it is an error.
                if self._fresh:
                    raise BrokenConnectionError("the event stream ended before its first event", sent=True)
                yield from self._disconnect()
                return None
            self._read_events(chunk)
        data, control = self._pending.pop(0)
        return wire.parse_live(control, data, content_type=self._content_type, base64=self._base64)

    def _connect(self) -> Steps[None]:
        response = yield from open_stream(
            wire.read(
                self.name,
                offset=self.offset,
                live="sse",
                cursor=self._cursor,
                wait_s=IDLE_S_MAX,
                **wire.continued_options(self._options),
            )
        )
        wire.check_status(response, 200)
        self._base64 = response.headers.get("stream-sse-data-encoding", "").lower() == "base64"
        self._parser = EventParser()
        self._data = None
        self._fresh = True
        self._open = True
        if self._base64 == _is_text(self._content_type):
            # The stream had no type when we caught up and has one now: catch up again to get it.
            raise BrokenConnectionError(
                "the encoding of the event stream does not match the content type", sent=True
            )

    def _read_events(self, chunk: bytes) -> None:
        try:
            events = self._parser.feed(chunk)
        except EventTooLargeError as error:
            raise ClientError(INVALID_ANSWER, str(error)) from error
        for event in events:
            if event.name == b"data":
                self._data = event.data
            elif event.name == b"control":
                self._pending.append((self._data, event.data))
                self._data = None
                self._fresh = False


def _is_text(content_type: str) -> bool:
    return is_json(content_type) or content_type.strip().lower().startswith("text/")
