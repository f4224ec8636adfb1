"""Follows the `__registry__` of every upstream, so that what is deleted elsewhere is not served here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import orjson

from tailrace.common.errors import TailraceError
from tailrace.edge.batch import FeedMessage
from tailrace.edge.connection import UpstreamLostError
from tailrace.edge.context import EdgeContext
from tailrace.edge.feed import UpstreamFeed, UpstreamRefusedError, open_feed, read_answer
from tailrace.edge.headers import build_request
from tailrace.edge.setbacks import ReconnectBackoff
from tailrace.edge.upstreams import Upstream

logger = logging.getLogger("tailrace.edge")

REGISTRY_STREAM = "__registry__"
# After a no: the stream may be forbidden, or not there yet.
REFUSED_PAUSE_S = 10.0
TICK_S = 1.0


class RegistryFollower:
    """Tells of streams that were deleted or made, whoever did it."""

    def __init__(self, context: EdgeContext, on_change: Callable[[str, str], None]) -> None:
        self._context = context
        self._followed = [
            UpstreamRegistry(context, upstream, on_change) for upstream in context.upstreams.all
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [self._context.loop.create_task(followed.run()) for followed in self._followed]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def vouches_since(self, moment: float) -> bool:
        """Whether everything that happened to streams since then is known here."""
        return all(followed.caught_up and followed.since <= moment for followed in self._followed)


class UpstreamRegistry:
    """The registry of one upstream, from one socket to the next without a gap."""

    def __init__(
        self, context: EdgeContext, upstream: Upstream, on_change: Callable[[str, str], None]
    ) -> None:
        self._context = context
        self._upstream = upstream
        self._on_change = on_change
        self.caught_up = False
        self.since = float("inf")  # loop time from which on nothing was missed
        self._offset = ""
        self._ended = asyncio.Event()
        self._setbacks = ReconnectBackoff()

    async def run(self) -> None:
        while True:
            try:
                feed = await self._open()
            except UpstreamLostError:
                self._upstream.note_failed(self._context.loop.time())
                await self._upstream.pause()
                continue
            except UpstreamRefusedError as refused:
                self._offset = ""  # where it was is of no use any more
                logger.debug("the registry is not followed: status %d", refused.refusal.status)
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            except TailraceError as refusal:  # requests of clients have filled the queue
                logger.debug("the registry is not followed for now: %s", refusal.message)
                self._setbacks.note()
                await self._setbacks.pause()
                continue
            opened_at = self._context.loop.time()
            await self._watch(feed)
            self._setbacks.note_ended(self._context.loop.time() - opened_at)
            await self._setbacks.pause()

    async def _open(self) -> UpstreamFeed:
        context = self._context
        begun = context.loop.time()
        fresh = not self._offset
        if fresh:
            self._offset = await self._tail()
        self._ended.clear()
        feed = await open_feed(
            self._upstream,
            context.edge_id,
            REGISTRY_STREAM,
            {"offset": self._offset},
            context.token,
            self._on_pair,
            self._on_end,
            context.limits.edge_frame_bytes,
        )
        if fresh:
            self.since = begun
        return feed

    async def _tail(self) -> str:
        host = self._upstream.origin.host_header
        target = f"/v1/stream/{REGISTRY_STREAM}".encode()
        request = build_request(b"HEAD", target, host, self._context.edge_id, self._context.token)
        reply = await self._upstream.pool.ask(request, head_only=True, again=True)
        if reply.status != 200:
            raise UpstreamRefusedError(await read_answer(reply))
        return (reply.get(b"stream-next-offset") or b"").decode("latin-1")

    async def _watch(self, feed: UpstreamFeed) -> None:
        try:
            while not self._ended.is_set():
                feed.on_tick(self._context.loop.time())
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._ended.wait()
                except TimeoutError:
                    continue
        finally:
            self.caught_up = False
            feed.close()

    def _on_pair(self, payload: bytes | None, control: FeedMessage) -> None:
        for change in orjson.loads(payload or b"[]"):
            operation = change.get("headers", {}).get("operation")
            if operation in ("insert", "delete"):
                self._on_change(str(change.get("key", "")), operation)
        self._offset = control.offset
        self.caught_up = control.up_to_date

    def _on_end(self, code: int) -> None:
        self.caught_up = False
        self._ended.set()
