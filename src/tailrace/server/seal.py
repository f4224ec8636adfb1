"""POST /v1/server/_seal: everything, or one stream, goes to the object store now."""

from __future__ import annotations

import asyncio

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.storage.sealing import SealingService

SEAL_PATH = b"/v1/server/_seal"


class SealRoute:
    """200 when it is done; 202 when it takes longer than a request may, so that the client asks again."""

    def __init__(self, context: Context, sealing: SealingService) -> None:
        self._context = context
        self._sealing = sealing
        self._tasks: set[asyncio.Task[None]] = set()

    def seal(self, exchange: Exchange, identity: Identity) -> None:
        name = parse_query(exchange.query).get("stream") or None
        authorise(identity, Action.SEAL, stream=name)
        if name is not None:
            self._context.log.readable(name)
        task = self._context.loop.create_task(self._answer(exchange, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange, name: str | None) -> None:
        status, body = 200, {"sealed": True}
        try:
            async with asyncio.timeout(self._context.limits.request_ms / 1000):
                await self._sealing.seal_now(name)
        except TimeoutError:
            status, body = 202, {"sealed": False}
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
            return
        exchange.respond(status, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))
