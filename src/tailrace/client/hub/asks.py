"""Questions that wait for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from tailrace.client.error import ClientError
from tailrace.client.hub.model import Message
from tailrace.client.hub.wire import OutgoingRequest, error_from_message


class PendingRequest:
    """One question, and what becomes of it."""

    __slots__ = ("answer", "on_part", "request")

    def __init__(self, request: OutgoingRequest, on_part: Callable[[Any], None] | None) -> None:
        self.request = request
        self.on_part = on_part
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def fail(self, error: ClientError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class PendingRequests:
    """Open questions by the id of their request. A late answer finds nobody, and is dropped."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[str, PendingRequest] = {}

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._open.values()))

    def open(self, request: OutgoingRequest, on_part: Callable[[Any], None] | None = None) -> PendingRequest:
        ask = self._open[request.id] = PendingRequest(request, on_part)
        return ask

    def close(self, ask: PendingRequest) -> None:
        self._open.pop(ask.request.id, None)
        if not ask.answer.cancel() and not ask.answer.cancelled():
            ask.answer.exception()  # looked at, so that asyncio does not complain that nobody did

    def take(self, message: Message) -> bool:
        """Whether somebody has waited for this."""
        ask = self._open.get(message.correlation_id or "")
        if ask is None or ask.answer.done():
            return False
        if message.type == "hub:broadcast_progress":
            return True
        if message.type == "hub:reply" and message.data.get("final") is False:
            if ask.on_part is not None:
                ask.on_part(message.data.get("data"))
            return True
        error = error_from_message(message)
        if error is None:
            ask.answer.set_result(message)
        else:
            ask.fail(error)
        return True

    def fail(self, error: ClientError) -> None:
        for ask in self:
            ask.fail(error)
