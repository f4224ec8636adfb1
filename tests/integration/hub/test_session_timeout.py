"""H-7: an actor that sends nothing times out, one that sends anything stays connected."""

from __future__ import annotations

import json
import socket

from conftest import StartServer
from support.calls import eventually
from support.edge import metrics
from support.hub_client import HUB, WAIT_S, Actor, Frame, now_ms
from support.ws_wire import frame
from tailrace.client.hub import Hub
from tailrace.protocol import websocket_frames as ws

HELLO = (
    b"GET /hub/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
REGISTER = {
    "id": "2",
    "to": HUB,
    "type": "hub:register",
    "timestamp": now_ms(),
    "payload": {"actorAddress": "@(t/silent)", "capabilities": ["x"]},
}


def _hello(address: str, *words: str) -> bytes:
    metadata = {"protocolVersion": "0.1.0", "capabilities": ["x", *words]}
    connect = {"id": "1", "from": address, "to": HUB, "type": "hub:connect", "pattern": "ask"}
    connect |= {"timestamp": now_ms(), "metadata": metadata}
    return HELLO + frame(ws.TEXT, json.dumps(connect).encode())


def _said(received: bytes) -> list[Frame]:
    """The envelopes in what the server wrote after its answer to the handshake."""
    found: list[Frame] = []
    rest = received.partition(b"\r\n\r\n")[2]
    while rest:
        opcode, size, start = rest[0] & 0x0F, rest[1], 2
        if size == 126:
            size, start = int.from_bytes(rest[2:4], "big"), 4
        if opcode == ws.TEXT:
            found.append(json.loads(rest[start : start + size]))
        rest = rest[start + size :]
    return found


def test_h7_a_silent_session_ends_and_one_that_answers_pings_does_not(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_HUB_HEARTBEAT_MS": "2000"})
    awake = Actor(server, "@(t/awake)")  # its library answers pings, and that is all it does
    awake.register()
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as silent:
        silent.sendall(_hello("@(t/silent)"))
        received = b""
        while piece := silent.recv(65536):
            received += piece
    welcome, goodbye = _said(received)
    assert welcome["type"] == "hub:connected"
    assert (goodbye["type"], goodbye["payload"]["reason"]) == ("hub:disconnect", "heartbeat_timeout")
    assert received.count(frame(ws.PING, mask=None)) >= 1, "it was asked before it was given up"
    assert received[-2 - len(b"ping timeout") :].startswith((4408).to_bytes(2, "big"))
    assert awake.ask("hub:heartbeat")["type"] == "hub:heartbeat_ack"
    awake.close()


def test_what_comes_after_the_goodbye_to_a_silent_session_waits_for_it(start_server: StartServer) -> None:
    """The socket is still open then, but nobody can be told anything through it."""
    server = start_server(env={"TAILRACE_HUB_HEARTBEAT_MS": "1000"})
    sender = Actor(server, "@(t/sender)")
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as silent:
        silent.sendall(_hello("@(t/silent)", "resume") + frame(ws.TEXT, json.dumps(REGISTER).encode()))
        received = b""
        while b"ping timeout" not in received:
            received += silent.recv(65536)
        told = sender.ask("hub:send", {"to": "@(t/silent)", "type": "late", "data": 1})
    assert told["payload"]["status"] == "queued"
    token = _said(received)[0]["payload"]["resumeToken"]
    back = Actor(server, "@(t/silent)", words=["x", "resume"], resume=token)
    assert back.connected["payload"]["resumed"] is True
    assert back.take()["type"] == "late"
    back.close()
    sender.close()


def test_a_client_that_connects_too_late_tries_again(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_HUB_CONNECT_MS": "1000"})
    asked: list[float] = []

    def token() -> str:
        """Takes longer than the server waits, the first time: the socket is open already."""
        asked.append(now_ms())
        if len(asked) == 1:
            name = 'tailrace_hub_ws_closes_total{code="1008"}'
            eventually(lambda: metrics(server).get(name, 0), lambda closes: closes == 1)
        return "any"

    hub = Hub(server.base_url, address="@(t/late)", token=token)
    try:
        hub.connect()
        hub.register()
        assert len(asked) == 2
    finally:
        hub.close()
