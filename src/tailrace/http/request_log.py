"""The request log: one line per request, for failures or for all requests."""

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
# Bounds the log of a server that fails all requests.
FAILURES_PER_S: Final = 50

_LEVELS: Final = {"off": logging.CRITICAL + 1, "failures": logging.WARNING, "all": logging.INFO}


class FailureLog:
    """Logs requests that fail with a server error, with a rate limit."""

    def __init__(self) -> None:
        self._second = 0
        self._written = 0
        self._suppressed = 0

    def log_failure(self, exchange: Exchange, refusal: TailraceError) -> None:
        if not logger.isEnabledFor(logging.WARNING):
            return
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._written = second, 0
        if self._written >= FAILURES_PER_S:
            self._suppressed += 1
            return
        self._written += 1
        fields = {**_fields(exchange, refusal.status), "code": refusal.code, "reason": refusal.message}
        if self._suppressed:
            fields["suppressed"] = self._suppressed
            self._suppressed = 0
        logger.warning("request failed", extra={"fields": fields})


def _no_extra_fields(_: Exchange) -> LogFields:
    return {}


failure_log: Final = FailureLog()
_extra_fields: Callable[[Exchange], LogFields] = _no_extra_fields


def configure_request_log(
    mode: RequestLogMode, extra_fields: Callable[[Exchange], LogFields] = _no_extra_fields
) -> None:
    """Set which requests are logged; `extra_fields` adds fields of the application to each line."""
    global _extra_fields
    logger.setLevel(_LEVELS[mode])
    _extra_fields = extra_fields


def log_request(exchange: Exchange, status: int, seconds: float, **more: object) -> None:
    """Write a line to the log of all requests."""
    fields = {**_fields(exchange, status), "ms": round(seconds * 1000, 3), **more}
    logger.info("request", extra={"fields": fields})


def _fields(exchange: Exchange, status: int) -> LogFields:
    """Never the query, the headers or the body, which may hold private data."""
    return {
        "request_id": exchange.assign_request_id(),
        "method": exchange.method.decode("latin-1"),
        "path": exchange.path[:PATH_BYTES_LOGGED].decode("latin-1"),
        "status": status,
        "peer": exchange.peer,
        **_extra_fields(exchange),
    }
