"""Which pages may open a WebSocket here: browsers send them with whatever the person at the screen may do."""

from __future__ import annotations

from urllib.parse import urlsplit

from tailrace.errors import TailraceError
from tailrace.net.http1 import Exchange
from tailrace.settings import Settings


def check_origin(exchange: Exchange, settings: Settings) -> None:
    """Pages of other sites cannot use the connection of whoever looks at them."""
    raw = exchange.headers.get(b"origin")
    if raw is None:
        return
    origin = raw.decode("latin-1")
    host = urlsplit(origin).netloc
    allowed = {one.strip() for one in settings.cors_origins.split(",")} - {"*"}
    if host and host == exchange.headers.get(b"host", b"").decode("latin-1"):
        return
    if origin in allowed:
        return
    if settings.loopback_only and urlsplit(origin).hostname in ("localhost", "127.0.0.1", "::1"):
        return
    raise TailraceError("forbidden", "pages of this origin may not connect (cors_origins)")
