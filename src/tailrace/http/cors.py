"""CORS: allowed origins, and the header lines that every response has.

Which web pages may call: `cors_origins` means the same for answers and WebSockets, of servers and edges.

Browsers ask before most requests to another origin, but open a WebSocket without asking: there the server has
to look at the page's origin itself.

The header lines that every answer carries, those of a server and those of an edge alike.
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
    """`*` allows every origin, a list those in it. Programs that are not browsers name none.

    With a list, a WebSocket may also be opened by the server's own pages. Where only this machine can reach
    the server these are all pages of this machine, whatever name the request has for the server: any name can
    be made to lead to 127.0.0.1.
    """

    def __init__(self, settings: Settings) -> None:
        named = frozenset(split_list(settings.cors_origins))
        self._named = None if "*" in named else named
        self._loopback_only = settings.loopback_only

    @property
    def allow_all(self) -> bool:
        return self._named is None

    def are_named(self, origin: str) -> bool:
        """Whether a page of this origin may read answers."""
        return self._named is None or origin in self._named

    def check(self, exchange: Exchange) -> None:
        """Refuses a WebSocket for a page that may not have one."""
        origin = exchange.headers.get(b"origin", b"").decode("latin-1")
        if origin and not self.are_named(origin) and not self._is_own(origin, exchange):
            raise TailraceError("forbidden", "pages of this origin may not connect (cors_origins)")

    def _is_own(self, origin: str, exchange: Exchange) -> bool:
        try:
            page = urlsplit(origin)
            if self._loopback_only:
                return page.hostname in LOOPBACK_NAMES
        except ValueError:
            return False
        return page.netloc != "" and page.netloc == exchange.headers.get(b"host", b"").decode("latin-1")


class CommonHeaders:
    """Policy, CORS and, where it is wanted, how long the answer took and with what."""

    def __init__(self, resource_policy: str, origins: AllowedOrigins, total: str | None) -> None:
        """`total` is what Server-Timing calls the whole; None leaves that header out."""
        self._origins = None if origins.allow_all else origins
        self._common = http_headers.common_header_lines(
            resource_policy, "*" if self._origins is None else None
        )
        self._total = total
        # What every request alike is given; None if it depends on the request.
        self.fixed = self._common if self._origins is None and total is None else None

    def __call__(self, exchange: Exchange | None) -> bytes:
        common = self._common
        if self._total is not None and exchange is not None:
            total_ms = (time.monotonic() - exchange.started) * 1000
            ours, _, theirs = exchange.phases.partition("\n")
            parts = (ours, f"{self._total};dur={total_ms:.3f}", theirs)
            common += http_headers.header_line("Server-Timing", ", ".join(part for part in parts if part))
        if self._origins is None:
            return common
        origin = b"" if exchange is None else exchange.headers.get(b"origin", b"")
        text = origin.decode("latin-1")
        if self._origins.are_named(text):
            return common + http_headers.header_line("Access-Control-Allow-Origin", text)
        return common


def add_timing_phase(exchange: Exchange, name: str, seconds: float) -> None:
    """Notes for Server-Timing how long a part of the request took."""
    ours, line_break, theirs = exchange.phases.partition("\n")
    phase = f"{name};dur={seconds * 1000:.3f}"
    exchange.phases = (f"{ours}, {phase}" if ours else phase) + line_break + theirs


def add_upstream_timing(exchange: Exchange, phases: str) -> None:
    """Notes what the server behind this one says of its own part; it follows the total, unchanged."""
    if phases:
        ours = exchange.phases.partition("\n")[0]
        exchange.phases = f"{ours}\n{phases}"
