"""H-7: whoever gives no sign of life is gone, whoever gives any stays."""

from __future__ import annotations

import json
import socket

from conftest import StartServer
from support.hub_client import HUB, WAIT_S, Actor, now_ms
from support.ws_wire import frame
from tailrace.protocol import ws_frames as ws

HELLO = (
    b"GET /hub/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def test_h7_a_silent_session_ends_and_one_that_answers_pings_does_not(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_HUB_HEARTBEAT_MS": "2000"})
    awake = Actor(server, "@(t/awake)")  # its library answers pings, and that is all it does
    awake.register()
    metadata = {"protocolVersion": "0.1.0", "capabilities": ["x"]}
    connect = {"id": "1", "from": "@(t/silent)", "to": HUB, "type": "hub:connect", "pattern": "ask"}
    connect |= {"timestamp": now_ms(), "metadata": metadata}
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as silent:
        silent.sendall(HELLO + frame(ws.TEXT, json.dumps(connect).encode()))
        received = b""
        while piece := silent.recv(65536):
            received += piece
    assert b'"hub:connected"' in received
    assert received.count(frame(ws.PING, mask=None)) >= 1, "it was asked before it was given up"
    assert received[-2 - len(b"no sign of life") :].startswith((4408).to_bytes(2, "big"))
    assert awake.ask("hub:heartbeat")["type"] == "hub:heartbeat_ack"
    awake.close()
