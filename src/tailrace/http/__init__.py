"""Transport: HTTP/1.1 and WebSocket on one listener. Knows nothing of streams.

`HttpServer` listens and hands each complete request to an `App` as an `Exchange`; the application answers
with `Exchange.respond`, streams with an `Outlet`, or takes the connection over as a WebSocket.
"""

from __future__ import annotations

from tailrace.http.exchange import App, Exchange, ResponseStream, chunk
from tailrace.http.server import HttpServer
from tailrace.http.websocket import WebSocketConnection, WebSocketHandler
from tailrace.protocol.websocket_frames import encode_text

__all__ = [
    "App",
    "Exchange",
    "HttpServer",
    "ResponseStream",
    "WebSocketConnection",
    "WebSocketHandler",
    "chunk",
    "encode_text",
]
