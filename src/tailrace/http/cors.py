"""CORS: allowed origins, and the header lines of every response, for servers and edges.

Browsers send a preflight before most requests to another origin, but open a WebSocket without one, so the
server has to check the Origin header of WebSocket requests itself.
"""

from __future__ import annotations

import time
from typing import Final
from urllib.parse import urlsplit

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings, split_list
from tailrace.http.exchange import Exchange
from tailrace.protocol import http_headers

LOOPBACK_NAMES: Final = frozenset(("localhost", "127.0.0.1", "::1"))


class AllowedOrigins:
    """The `cors_origins` setting: `*` or a list. Clients other than browsers send no origin.

    With a list, the server's own pages may also open a WebSocket. On a loopback-only server these are all
    pages of this machine; the Host header is not compared, because any name can be made to resolve to
    127.0.0.1.
    """

    def __init__(self, settings: Settings) -> None:
        named = frozenset(split_list(settings.cors_origins))
        self._named = None if "*" in named else named
        self._loopback_only = settings.loopback_only

    @property
    def allow_all(self) -> bool:
        return self._named is None

    def allows(self, origin: str) -> bool:
        """Whether a page of this origin may read responses."""
        return self._named is None or origin in self._named

    def check_websocket(self, exchange: Exchange) -> None:
        """Refuse a WebSocket to a page whose origin is not allowed."""
        origin = exchange.headers.get(b"origin", b"").decode("latin-1")
        if origin and not self.allows(origin) and not self._is_own(origin, exchange):
            raise TailraceError("forbidden", "origin not allowed, add it to cors_origins")

    def _is_own(self, origin: str, exchange: Exchange) -> bool:
        try:
            page = urlsplit(origin)
            if self._loopback_only:
                return page.hostname in LOOPBACK_NAMES
        except ValueError:
            return False
        return page.netloc != "" and page.netloc == exchange.headers.get(b"host", b"").decode("latin-1")


class CommonHeaders:
    """Resource policy, CORS and, if enabled, Server-Timing."""

    def __init__(self, resource_policy: str, origins: AllowedOrigins, total: str | None) -> None:
        """`total` is the name of the whole request in Server-Timing; None omits that header."""
        self._origins = None if origins.allow_all else origins
        self._common = http_headers.common_header_lines(
            resource_policy, "*" if self._origins is None else None
        )
        self._total = total
        # The lines if they are the same for all requests, else None.
        self.fixed = self._common if self._origins is None and total is None else None

    def __call__(self, exchange: Exchange | None) -> bytes:
        common = self._common
        if self._total is not None and exchange is not None:
            total_ms = (time.monotonic() - exchange.started) * 1000
            ours, _, theirs = exchange.timing_phases.partition("\n")
            parts = (ours, f"{self._total};dur={total_ms:.3f}", theirs)
            common += http_headers.header_line("Server-Timing", ", ".join(part for part in parts if part))
        if self._origins is None:
            return common
        origin = b"" if exchange is None else exchange.headers.get(b"origin", b"")
        text = origin.decode("latin-1")
        if self._origins.allows(text):
            return common + http_headers.header_line("Access-Control-Allow-Origin", text)
        return common


def add_timing_phase(exchange: Exchange, name: str, seconds: float) -> None:
    """Record the duration of a part of the request for Server-Timing."""
    ours, line_break, theirs = exchange.timing_phases.partition("\n")
    phase = f"{name};dur={seconds * 1000:.3f}"
    exchange.timing_phases = (f"{ours}, {phase}" if ours else phase) + line_break + theirs


def add_upstream_timing(exchange: Exchange, phases: str) -> None:
    """Record the upstream's own timing; it follows the total, unchanged."""
    if phases:
        ours = exchange.timing_phases.partition("\n")[0]
        exchange.timing_phases = f"{ours}\n{phases}"
