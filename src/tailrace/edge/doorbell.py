"""Waiting at a channel for something to happen, without being sent anything."""

from __future__ import annotations

import asyncio

from tailrace.edge.channel import Channel


class ChannelWaiter:
    """A reader that only wants to know. One wait each."""

    def __init__(
        self, channel: Channel, authorization: bytes | None = None, until_s: float | None = None
    ) -> None:
        self._channel = channel
        self.authorization = authorization
        self.until_s = until_s
        self._rung = asyncio.Event()

    def on_batches(self) -> None:
        self._rung.set()

    def on_end(self, code: int) -> None:
        self._rung.set()

    async def wait(self, seconds: float) -> bool:
        """True if something happened, false if the time was up."""
        self._channel.attach(self)
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            return False
        finally:
            self._channel.detach(self)
        return True

    @staticmethod
    async def reached(channel: Channel, offset: str, seconds: float) -> bool:
        """Waits until a channel has come to an offset. False if it does not, or is over."""
        until = asyncio.get_running_loop().time() + seconds
        while channel.end < offset and not channel.over and not channel.closed:
            left = until - asyncio.get_running_loop().time()
            if left <= 0 or not await ChannelWaiter(channel).wait(left):
                return False
        return channel.end >= offset or channel.over
