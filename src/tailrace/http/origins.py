"""Which web pages may call: `cors_origins` means the same for answers and WebSockets, of servers and edges.

Browsers ask before most requests to another origin, but open a WebSocket without asking: there the server has
to look at the page's origin itself.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings, split_list
from tailrace.http.exchange import Exchange

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
