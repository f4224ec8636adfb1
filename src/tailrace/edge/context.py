"""What every part of an edge works with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from tailrace.clock import Clock
from tailrace.edge.connection import Reply
from tailrace.edge.metrics import EdgeTelemetry
from tailrace.edge.upstreams import Upstreams
from tailrace.errors import TailraceError
from tailrace.limits import Limits
from tailrace.net.http1 import Exchange
from tailrace.protocol.refusals import error_answer
from tailrace.settings import Settings

logger = logging.getLogger("tailrace.edge")


class EdgeContext:
    """The parts that are put together once, and the tasks that are under way."""

    def __init__(
        self,
        settings: Settings,
        upstreams: Upstreams,
        telemetry: EdgeTelemetry,
        clock: Clock,
        edge_id: bytes,
        token: bytes | None,
    ) -> None:
        self.settings = settings
        self.limits: Limits = settings.limits
        self.upstreams = upstreams
        self.telemetry = telemetry
        self.clock = clock
        self.edge_id = edge_id
        self.loop = asyncio.get_running_loop()
        # What the edge does on its own account it does with this, but only where it checks clients itself.
        self.token = token if settings.auth_configured else None
        self._tasks: set[asyncio.Task[None]] = set()

    def now_s(self) -> float:
        return self.clock.now_ns() / 1e9

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def answer_later(self, exchange: Exchange, work: Coroutine[None, None, None], *, wait: bool) -> None:
        """Lets `work` answer a request. A wait ends with its client; a write is never given up half-way."""
        task = self.spawn(self._guard(exchange, work))
        if wait:
            exchange.on_gone = lambda: _cancel(task)

    async def _guard(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except TailraceError as refusal:
            exchange.respond(*self.refusal(exchange, refusal))
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a request failed")
            if exchange.answered:
                exchange.connection.transport.abort()
            else:
                exchange.respond(*self.refusal(exchange, TailraceError("internal", "internal error")))
        finally:
            exchange.on_gone = None

    def refusal(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        """A no of the edge itself; the request can be asked about by its id, as on a server."""
        self.telemetry.edge_refused.add(error.code)
        if exchange is not None:
            exchange.name()
        return error_answer(error)

    def note_upstream(self, exchange: Exchange, begun: float, reply: Reply) -> None:
        """For Server-Timing: how long the upstream took, and what it says itself."""
        if self.settings.server_timing:
            phase = f"edge-upstream;dur={(self.loop.time() - begun) * 1000:.3f}"
            owner = (reply.get(b"server-timing") or b"").decode("latin-1")
            exchange.phases = ", ".join(part for part in (exchange.phases, phase, owner) if part)

    async def stop(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
