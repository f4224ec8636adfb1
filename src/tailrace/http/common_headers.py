"""The header lines that every answer carries, those of a server and those of an edge alike."""

from __future__ import annotations

import time

from tailrace.http.exchange import Exchange
from tailrace.http.origins import AllowedOrigins
from tailrace.protocol import headers


class CommonHeaders:
    """Policy, CORS and, where it is wanted, how long the answer took and with what."""

    def __init__(self, resource_policy: str, origins: AllowedOrigins, total: str | None) -> None:
        """`total` is what Server-Timing calls the whole; None leaves that header out."""
        self._origins = None if origins.allow_all else origins
        self._common = headers.common_header_lines(resource_policy, "*" if self._origins is None else None)
        self._total = total
        # What every request alike is given; None if it depends on the request.
        self.fixed = self._common if self._origins is None and total is None else None

    def __call__(self, exchange: Exchange | None) -> bytes:
        common = self._common
        if self._total is not None and exchange is not None:
            total_ms = (time.monotonic() - exchange.started) * 1000
            ours, _, theirs = exchange.phases.partition("\n")
            parts = (ours, f"{self._total};dur={total_ms:.3f}", theirs)
            common += headers.header_line("Server-Timing", ", ".join(part for part in parts if part))
        if self._origins is None:
            return common
        origin = b"" if exchange is None else exchange.headers.get(b"origin", b"")
        text = origin.decode("latin-1")
        if self._origins.are_named(text):
            return common + headers.header_line("Access-Control-Allow-Origin", text)
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
