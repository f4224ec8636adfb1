"""Messages that have come and were not taken yet, bounded in number and bytes."""

from __future__ import annotations

import asyncio
from collections import deque

from tailrace.client.error import ClientError
from tailrace.client.hub.model import Message


class Inbox:
    """First in, first out. Whoever fills it waits while it is full: then the socket is not read either."""

    __slots__ = ("_bytes", "_bytes_max", "_changed", "_ended", "_error", "_messages", "_messages_max", "full")

    def __init__(self, *, messages_max: int, bytes_max: int) -> None:
        self._messages: deque[Message] = deque()
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._error: ClientError | None = None
        self.full = False

    async def put(self, message: Message) -> None:
        while not self._ended and self._is_full():
            self.full = True
            await self._wait()
        self.full = False
        self._messages.append(message)
        self._bytes += message.size_bytes
        self._changed.set()

    async def get(self) -> Message | None:
        """The next message; None after the end, or the error that it ended with."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            await self._wait()
        message = self._messages.popleft()
        self._bytes -= message.size_bytes
        self._changed.set()
        return message

    def end(self, error: ClientError | None) -> None:
        """Nothing more will come. What is there can still be taken."""
        self._ended = True
        self._error = error
        self._changed.set()

    def _is_full(self) -> bool:
        return len(self._messages) >= self._messages_max or self._bytes >= self._bytes_max

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
