"""Transport: HTTP/1.1 and WebSocket on one listener. Knows nothing of streams."""

from __future__ import annotations

from tailrace.net.http1 import App, Exchange, HttpServer, Outlet, chunk
from tailrace.net.websocket import WebSocketConnection, WebSocketHandler, encode_text

__all__ = [
    "App",
    "Exchange",
    "HttpServer",
    "Outlet",
    "WebSocketConnection",
    "WebSocketHandler",
    "chunk",
    "encode_text",
]
