"""Follows deletions (`__registry__`) and revocations of every upstream, so that the edge serves neither.

Revocations are polled with the token of the edge, as hashes, so an edge does not need the server's keys file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import orjson

from tailrace.auth import IdentityStore, RevokedHashes
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet, wait_event
from tailrace.edge.context import EdgeContext
from tailrace.edge.reconnect import ReconnectBackoff
from tailrace.edge.requests import build_request
from tailrace.edge.upstream_feed import (
    FeedMessage,
    UpstreamFeed,
    UpstreamRefusedError,
    open_feed,
    read_answer,
)
from tailrace.edge.upstreams import Upstream
from tailrace.http.client import UpstreamLostError

logger = logging.getLogger("tailrace.edge")

REGISTRY_STREAM = "__registry__"
# After an error status: the stream may be forbidden, or not exist yet.
REFUSED_PAUSE_S = 10.0
TICK_S = 1.0


class RegistryFollower:
    """Follows the deletions and creations of all upstreams."""

    def __init__(self, context: EdgeContext, on_change: Callable[[str, str], None]) -> None:
        self._context = context
        self._followed = [
            UpstreamRegistry(context, upstream, on_change) for upstream in context.upstreams.all
        ]
        self._tasks = TaskSet()

    def start(self) -> None:
        for followed in self._followed:
            self._tasks.start(followed.run())

    async def stop(self) -> None:
        await self._tasks.close()

    def is_complete_since(self, moment: float) -> bool:
        """Whether all changes of streams since then are known here."""
        return all(followed.caught_up and followed.since <= moment for followed in self._followed)


class UpstreamRegistry:
    """Follows the registry of one upstream across reconnects without a gap."""

    def __init__(
        self, context: EdgeContext, upstream: Upstream, on_change: Callable[[str, str], None]
    ) -> None:
        self._context = context
        self._upstream = upstream
        self._on_change = on_change
        self.caught_up = False
        self.since = float("inf")  # loop time since which no event was missed
        self._offset = ""
        self._ended = asyncio.Event()
        self._reconnects = ReconnectBackoff()

    async def run(self) -> None:
        while True:
            try:
                feed = await self._open()
            except UpstreamLostError:
                self._upstream.record_failed(self._context.loop.time())
                await self._upstream.pause()
                continue
            except UpstreamRefusedError as refused:
                self._offset = ""  # starts again at the tail
                logger.debug("registry feed refused", extra=log_fields(status=refused.refusal.status))
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            except TailraceError as refusal:  # requests of clients have filled the queue
                logger.debug("registry feed unavailable", extra=log_fields(error=refusal.message))
                self._reconnects.record_refusal()
                await self._reconnects.pause()
                continue
            opened_at = self._context.loop.time()
            await self._watch(feed)
            self._reconnects.record_close(self._context.loop.time() - opened_at)
            await self._reconnects.pause()

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
        reply = await self._upstream.pool.request(request, head_only=True, again=True)
        if reply.status != 200:
            raise UpstreamRefusedError(await read_answer(reply))
        return (reply.get(b"stream-next-offset") or b"").decode("latin-1")

    async def _watch(self, feed: UpstreamFeed) -> None:
        try:
            while not self._ended.is_set():
                feed.on_tick(self._context.loop.time())
                await wait_event(self._ended, TICK_S)
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


REVOKED_PATH = b"/v1/server/_revoked"
REVOCATION_POLL_S = 2.0
# Slower polling after a refusal, until the token changes.
REFUSED_POLLS = 5
# The first poll is awaited before serving, up to this time.
FIRST_POLL_S_MAX = 2.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024

_decode_marks = msgspec.json.Decoder(RevokedHashes).decode


class RevocationFollower:
    """Polls all upstreams. A revocation of one applies to all reads here."""

    def __init__(self, context: EdgeContext, book: IdentityStore, on_change: Callable[[], None]) -> None:
        self._context = context
        self._on_change = on_change
        self._followed = [UpstreamRevocations(context, upstream, book) for upstream in context.upstreams.all]
        self._tasks = TaskSet()
        context.telemetry.edge_following.reads[("revocations",)] = lambda: float(self.is_followed)

    @property
    def is_followed(self) -> bool:
        return all(followed.is_known for followed in self._followed)

    async def start(self) -> None:
        loop = self._context.loop
        first = [loop.create_task(self._poll(followed)) for followed in self._followed]
        await asyncio.wait(first, timeout=FIRST_POLL_S_MAX)
        for followed in self._followed:
            self._tasks.start(self._watch(followed))

    async def stop(self) -> None:
        await self._tasks.close()

    async def _watch(self, followed: UpstreamRevocations) -> None:
        while True:
            await asyncio.sleep(REVOCATION_POLL_S)
            if followed.may_look():
                await self._poll(followed)

    async def _poll(self, followed: UpstreamRevocations) -> None:
        try:
            changed = await followed.look()
        except (UpstreamLostError, TailraceError):
            followed.is_known = False  # keeps the last loaded revocations
            return
        if changed:
            self._on_change()


class UpstreamRevocations:
    """The revocations of one upstream."""

    def __init__(self, context: EdgeContext, upstream: Upstream, book: IdentityStore) -> None:
        self._context = context
        self._upstream = upstream
        self._book = book
        self._tag = b""
        self._warned = False
        self._asked_with: bytes | None = None
        self._looks_left_out = 0
        self.is_known = False

    def may_look(self) -> bool:
        own = self._context.own_token
        if not self._warned or (own is not None and own.value != self._asked_with):
            return True
        self._looks_left_out = (self._looks_left_out + 1) % REFUSED_POLLS
        return self._looks_left_out == 0

    async def look(self) -> bool:
        """True if the revocations changed."""
        context, own = self._context, self._context.own_token
        known = b"if-none-match: %b\r\n" % self._tag if self._tag else b""
        bearer = self._asked_with = None if own is None else own.value
        host = self._upstream.origin.host_header
        reply = await self._upstream.pool.request(
            build_request(b"GET", REVOKED_PATH, host, context.edge_id, bearer, known), again=True
        )
        body = await reply.body(ANSWER_BYTES_MAX)
        if own is not None:
            own.note_answer(self._upstream.id, reply.status)
        if reply.status == 304:
            self.is_known, self._warned = True, False
            return False
        if reply.status != 200 or body is None:
            self._warn_once(reply.status)
            return False
        try:
            marks = _decode_marks(body)
        except msgspec.DecodeError:
            self._warn_once(reply.status)
            return False
        self._tag = reply.get(b"etag") or b""
        self.is_known, self._warned = True, False
        return self._book.set_followed(self._upstream.id, marks)

    def _warn_once(self, status: int) -> None:
        self.is_known = False
        warned, self._warned = self._warned, True
        if warned or self._context.settings.auth_keys_file:
            return  # revocations come from the file
        logger.warning(
            "cannot read revocations, revoked tokens stay valid here until they expire: set --token-file "
            "(scope read, no streams claim) or --auth-keys-file",
            extra=log_fields(upstream=self._upstream.id, status=status),
        )
