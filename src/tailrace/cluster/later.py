"""Answers that have to wait for somebody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.routing import responses

logger = logging.getLogger("tailrace.workers")


class DeferredResponses:
    """Work for a request that goes on after its handler returned. Refusals are answered as ever."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
        except Exception:
            logger.exception("a request failed")
            responses.respond_error(exchange, TailraceError("internal", "internal error"))
