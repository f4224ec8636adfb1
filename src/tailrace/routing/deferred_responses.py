"""Responses from coroutines: each request gets exactly one, also if its work times out or fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.routing.responses import respond_error, stream_deleted

logger = logging.getLogger("tailrace.api")

PATH_BYTES_LOGGED: Final = 512

Response = tuple[int, bytes, bytes]  # status, header lines, body


class DeferredResponses(TaskSet):
    """The work of requests that are answered later; without a time-out unless one is given."""

    __slots__ = ("_timeout_s",)

    def __init__(self, timeout_ms: int | None = None) -> None:
        super().__init__()
        self._timeout_s = None if timeout_ms is None else timeout_ms / 1000

    def respond(
        self,
        exchange: Exchange,
        work: Coroutine[Any, Any, Response | None],
        *,
        stream: Stream | None = None,
        timeout_message: str = "request timed out",
    ) -> asyncio.Task[None]:
        """Respond with the result of the work, unless it is None: then the work has responded itself.

        If `stream` was deleted in the meantime, an error says that instead of what failed because of it.
        """
        return self.start(self._respond(exchange, work, stream, timeout_message))

    async def _respond(
        self,
        exchange: Exchange,
        work: Coroutine[Any, Any, Response | None],
        stream: Stream | None,
        timeout_message: str,
    ) -> None:
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                response = await work
        except Exception as failure:  # noqa: BLE001 - becomes an error response
            if timeout.expired():
                error = TailraceError("request_timeout", timeout_message)
            elif stream is not None and stream.removed:
                error = stream_deleted(stream)
            elif isinstance(failure, TailraceError):
                error = failure
            else:
                error = TailraceError("internal", "internal error")
                _log_failure(exchange, failure)
        else:
            if response is not None:
                exchange.respond(*response)
            return
        if not exchange.answered:
            respond_error(exchange, error)


def _log_failure(exchange: Exchange, failure: Exception) -> None:
    path = exchange.path[:PATH_BYTES_LOGGED].decode("latin-1")
    fields = log_fields(path=path, request_id=exchange.assign_request_id())
    logger.error("request handler failed", exc_info=failure, extra=fields)
