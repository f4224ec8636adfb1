"""A long-poll that waits: for the next commit, or for one with the key or the match it asks for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.routing import responses
from tailrace.server.read_request import ReadRequest

if TYPE_CHECKING:
    from tailrace.server.read import ReadRoutes


class LongPoll:
    """One waiting reader: a place in the stream's list and one timer."""

    __slots__ = ("_exchange", "_position", "_request", "_routes", "_timer")

    def __init__(self, routes: ReadRoutes, exchange: Exchange, request: ReadRequest) -> None:
        self._routes = routes
        self._exchange = exchange
        self._request = request
        self._position = request.start
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        stream = self._request.stream
        if stream.removed or stream.gone:
            self.on_published(stream)
            return
        if stream.visible_closed or self._request.wait_ms == 0:
            self._routes.answer_idle(self._exchange, self._request, self._position)
            return
        self._routes.live_opened(stream)
        if stream.readers is None:
            stream.readers = []
        stream.readers.append(self)
        self._timer = self._routes.later(self._request.wait_ms, self._time_is_up)
        self._exchange.on_gone = self._leave

    def on_published(self, stream: Stream) -> None:
        request = self._request
        if stream.removed or stream.gone:
            self._leave()
            responses.respond_error(self._exchange, responses.stream_deleted(stream))
            return
        if stream.visible > self._position:
            if request.key or request.filter_text:
                # Only what is new has to be looked at; what does not match is passed over for good.
                found = self._routes.next_match(request, self._position)
                if isinstance(found, Page) and not found.count:
                    self._position = found.next_entry
                    if not stream.visible_closed:
                        return
                    self._leave()
                    self._routes.answer_idle(self._exchange, request, self._position)
                    return
            self._leave()
            # The stream may have had no type when the wait began; the append that ended it gave it one.
            fmt = request.fmt if request.fmt_given else "json" if stream.json else "raw"
            self._routes.answer(self._exchange, request._replace(start=self._position, fmt=fmt))
        elif stream.visible_closed:
            self._leave()
            self._routes.answer_idle(self._exchange, request, self._position)

    def _time_is_up(self) -> None:
        self._leave()
        self._routes.answer_idle(self._exchange, self._request, self._position)

    def end(self) -> None:
        """The server stops: the client is told to come back, as if the time were up."""
        self._time_is_up()

    @property
    def identity(self) -> Identity:
        return self._request.identity

    @property
    def stream(self) -> Stream:
        return self._request.stream

    def refuse(self, refusal: TailraceError) -> None:
        """The client may not wait any longer."""
        self._leave()
        responses.respond_error(self._exchange, refusal)

    def _leave(self) -> None:
        if self._timer is None:
            return
        self._routes.note_wait(self._exchange)
        self._timer.cancel()
        self._timer = None
        stream = self._request.stream
        remove_reader(stream, self)
        self._routes.live_ended(stream)


def remove_reader(stream: Stream, reader: object) -> None:
    """Takes a reader off the stream's list; an empty list is no list at all."""
    readers = stream.readers
    if readers is not None:
        stream.readers = [other for other in readers if other is not reader] or None
