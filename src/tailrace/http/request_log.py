"""One log line per request, for those that somebody has to look at or for all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from tailrace.common.errors import TailraceError
    from tailrace.http.exchange import Exchange

logger = logging.getLogger("tailrace.requests")

RequestLogMode = Literal["off", "failures", "all"]
LogFields = dict[str, object]

PATH_BYTES_LOGGED: Final = 512
# A server in trouble refuses everybody: the log says so, and does not fill the disk with it.
FAILURES_PER_S: Final = 50

_LEVELS: Final = {"off": logging.CRITICAL + 1, "failures": logging.WARNING, "all": logging.INFO}


class FailureLog:
    """Refusals that are the server's fault, so many a second at most."""

    def __init__(self) -> None:
        self._second = 0
        self._written = 0
        self._left_out = 0

    def tell(self, exchange: Exchange, refusal: TailraceError) -> None:
        if not logger.isEnabledFor(logging.WARNING):
            return
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._written = second, 0
        if self._written >= FAILURES_PER_S:
            self._left_out += 1
            return
        self._written += 1
        fields = {**_fields(exchange, refusal.status), "code": refusal.code, "reason": refusal.message}
        if self._left_out:
            fields["left_out"] = self._left_out
            self._left_out = 0
        logger.warning("request failed", extra={"fields": fields})


def _no_extra_fields(_: Exchange) -> LogFields:
    return {}


failure_log: Final = FailureLog()
_extra_fields: Callable[[Exchange], LogFields] = _no_extra_fields


def configure_request_log(
    choice: RequestLogMode, more: Callable[[Exchange], LogFields] = _no_extra_fields
) -> None:
    """`more` is what else is known of a request, for its line."""
    global _extra_fields
    logger.setLevel(_LEVELS[choice])
    _extra_fields = more


def log_request(exchange: Exchange, status: int, seconds: float, **more: object) -> None:
    """A line of the log of all requests."""
    fields = {**_fields(exchange, status), "ms": round(seconds * 1000, 3), **more}
    logger.info("request", extra={"fields": fields})


def _fields(exchange: Exchange, status: int) -> LogFields:
    """Never the query, the headers or the body: they may hold what is nobody's business."""
    return {
        "request_id": exchange.name(),
        "method": exchange.method.decode("latin-1"),
        "path": exchange.path[:PATH_BYTES_LOGGED].decode("latin-1"),
        "status": status,
        "peer": exchange.peer,
        **_extra_fields(exchange),
    }
