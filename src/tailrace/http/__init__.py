"""HTTP/1.1 and WebSocket transport on one listener. Knows nothing of streams.

`HttpServer` listens and passes each complete request to an `App` as an `Exchange`. The application responds
with `Exchange.respond`, streams with a `ResponseStream`, or upgrades the connection to a WebSocket.
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
