"""Which pages may open WebSockets. Browsers ask nobody before they do: the server has to look by itself."""

from __future__ import annotations

from tailrace.errors import TailraceError
from tailrace.net.http1 import Exchange
from tailrace.settings import Settings, listed


class Origins:
    """Those of `cors_origins`; with `*` all of them. Programs that are no browsers name none."""

    def __init__(self, settings: Settings) -> None:
        allowed = frozenset(listed(settings.cors_origins))
        self._allowed = None if "*" in allowed else allowed

    def check(self, exchange: Exchange) -> None:
        origin = exchange.headers.get(b"origin", b"").decode("latin-1")
        if origin and self._allowed is not None and origin not in self._allowed:
            raise TailraceError("forbidden", "pages of this origin may not connect (cors_origins)")
