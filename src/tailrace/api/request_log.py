"""One log line per request, for those that somebody has to look at or for all of them."""

from __future__ import annotations

import logging
import time
from typing import Final, Literal

from tailrace.api.proxies import Proxies
from tailrace.api.vouched import Vouching
from tailrace.errors import TailraceError
from tailrace.net.http1 import Exchange

logger = logging.getLogger("tailrace.requests")

Choice = Literal["off", "failures", "all"]

PATH_BYTES_LOGGED: Final = 512
# A server in trouble refuses everybody: the log says so, and does not fill the disk with it.
FAILURES_PER_S: Final = 50

_LEVELS: Final = {"off": logging.CRITICAL + 1, "failures": logging.WARNING, "all": logging.INFO}
_vouching = Vouching("")


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


failures: Final = FailureLog()


def configure(choice: Choice, edge_key: str = "") -> None:
    """`edge_key` is what edges sign their word about clients with; without it they are not believed."""
    global _vouching
    logger.setLevel(_LEVELS[choice])
    _vouching = Vouching(edge_key)


def trust(proxies: Proxies) -> None:
    """Whose word about clients the log may repeat."""
    _vouching.proxies = proxies


def answered(exchange: Exchange, status: int, seconds: float) -> None:
    """A line of the log of all requests. Failures have theirs already, with the reason."""
    if status < 500:
        fields = {**_fields(exchange, status), "ms": round(seconds * 1000, 3)}
        logger.info("request", extra={"fields": fields})


def _fields(exchange: Exchange, status: int) -> dict[str, object]:
    """Never the query, the headers or the body: they may hold what is nobody's business."""
    fields: dict[str, object] = {
        "request_id": exchange.name(),
        "method": exchange.method.decode("latin-1"),
        "path": exchange.path[:PATH_BYTES_LOGGED].decode("latin-1"),
        "status": status,
        "peer": exchange.peer,
    }
    client = _vouching.proxies.remote_of(exchange)
    if client != exchange.peer:
        fields["client"] = client
    vouched = _vouching.client_of(exchange)
    if vouched is not None:
        fields |= {"client": vouched.ip, "sub": vouched.sub, "edge": vouched.edge_id}
    return fields
