"""Transport: HTTP/1.1 and WebSocket on one listener. Knows nothing of streams.

`HttpServer` listens and hands each complete request to an `App` as an `Exchange`; the application answers
with `Exchange.respond`, streams with an `Outlet`, or takes the connection over as a WebSocket.
"""

from __future__ import annotations

from tailrace.net.app import App
from tailrace.net.exchange import Exchange
from tailrace.net.outlet import Outlet
from tailrace.net.server import HttpServer
from tailrace.net.websocket import WebSocketConnection, WebSocketHandler
from tailrace.net.wire import chunk
from tailrace.protocol.ws_frames import encode_text

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
