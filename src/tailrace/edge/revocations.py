"""Follows what upstreams have revoked, so that a token that is good no more there is none here.

An edge need not have the file that its server keeps revocations in. It asks for them with its own token, by
hashes, and asks again every few seconds whether there is anything new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from tailrace.auth import IdentityStore, RevokedHashes
from tailrace.common.errors import TailraceError
from tailrace.edge.connection import UpstreamLostError
from tailrace.edge.context import EdgeContext
from tailrace.edge.headers import build_request
from tailrace.edge.upstreams import Upstream

logger = logging.getLogger("tailrace.edge")

REVOKED_PATH = b"/v1/server/_revoked"
REVOCATION_POLL_S = 2.0
# Who was refused asks less often, until it has another token.
REFUSED_POLLS = 5
# The first look comes before the first client, unless an upstream takes longer than this.
FIRST_POLL_S_MAX = 2.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024

_decode_marks = msgspec.json.Decoder(RevokedHashes).decode


class RevocationFollower:
    """Asks all upstreams. What one of them has revoked counts for all that is read here."""

    def __init__(self, context: EdgeContext, book: IdentityStore, on_change: Callable[[], None]) -> None:
        self._context = context
        self._on_change = on_change
        self._followed = [UpstreamRevocations(context, upstream, book) for upstream in context.upstreams.all]
        self._tasks: list[asyncio.Task[None]] = []
        context.telemetry.edge_following.reads[("revocations",)] = lambda: float(self.is_followed)

    @property
    def is_followed(self) -> bool:
        return all(followed.is_told for followed in self._followed)

    async def start(self) -> None:
        loop = self._context.loop
        first = [loop.create_task(self._look(followed)) for followed in self._followed]
        await asyncio.wait(first, timeout=FIRST_POLL_S_MAX)
        self._tasks = [loop.create_task(self._watch(followed)) for followed in self._followed]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, followed: UpstreamRevocations) -> None:
        while True:
            await asyncio.sleep(REVOCATION_POLL_S)
            if followed.may_look():
                await self._look(followed)

    async def _look(self, followed: UpstreamRevocations) -> None:
        try:
            changed = await followed.look()
        except (UpstreamLostError, TailraceError):
            followed.is_told = False  # what is known stays in force
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
        self.is_told = False

    def may_look(self) -> bool:
        own = self._context.own_token
        if not self._warned or (own is not None and own.value != self._asked_with):
            return True
        self._looks_left_out = (self._looks_left_out + 1) % REFUSED_POLLS
        return self._looks_left_out == 0

    async def look(self) -> bool:
        """True if something is revoked, or is no more."""
        context, own = self._context, self._context.own_token
        known = b"if-none-match: %b\r\n" % self._tag if self._tag else b""
        bearer = self._asked_with = None if own is None else own.value
        host = self._upstream.origin.host_header
        reply = await self._upstream.pool.ask(
            build_request(b"GET", REVOKED_PATH, host, context.edge_id, bearer, known), again=True
        )
        body = await reply.body(ANSWER_BYTES_MAX)
        if own is not None:
            own.note_answer(self._upstream.id, reply.status)
        if reply.status == 304:
            self.is_told, self._warned = True, False
            return False
        if reply.status != 200 or body is None:
            self._tell_once(reply.status)
            return False
        try:
            marks = _decode_marks(body)
        except msgspec.DecodeError:
            self._tell_once(reply.status)
            return False
        self._tag = reply.get(b"etag") or b""
        self.is_told, self._warned = True, False
        return self._book.follow(self._upstream.id, marks)

    def _tell_once(self, status: int) -> None:
        self.is_told = False
        warned, self._warned = self._warned, True
        if warned or self._context.settings.auth_keys_file:
            return  # the file says the same, if it is the server's
        logger.warning(
            "what upstream %s revokes is not known to this edge (status %d): kept slices and shared sockets "
            "stay open to a revoked token until it expires. Give the edge a token of scope read without a "
            "streams claim (--token-file), or the file that its server has (--auth-keys-file)",
            self._upstream.id,
            status,
        )
