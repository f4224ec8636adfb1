"""Transport: HTTP/1.1 and WebSocket on one listener. Knows nothing of streams."""

from __future__ import annotations

from tailrace.net.http1 import App, Exchange, HttpServer, Outlet, chunk

__all__ = ["App", "Exchange", "HttpServer", "Outlet", "chunk"]
