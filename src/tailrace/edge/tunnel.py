"""Upgraded connections that pass the edge byte for byte."""

from __future__ import annotations

from tailrace.edge.connection import UpstreamConnection, UpstreamResponse
from tailrace.edge.headers import RESPONSE_REPLACED, cache_line
from tailrace.http.exchange import REQUEST_ID_HEADER, Exchange, status_line
from tailrace.http.relay import TunnelEnd


class ClientTunnelEnd(TunnelEnd):
    """The client's end: an edge that stops closes it, since its upstream does not know of that."""

    __slots__ = ()

    def drain(self) -> None:
        self.transport.close()


def open_tunnel(exchange: Exchange, reply: UpstreamResponse, connection: UpstreamConnection) -> None:
    """Joins a client and an upstream that has agreed to leave HTTP."""
    client = exchange.connection
    if exchange.answered or connection.closed:
        connection.abort()
        client.transport.abort()
        return
    server = client.server
    lines = b"".join(b"%b: %b\r\n" % field for field in reply.fields if _passes(field[0].lower()))
    bypass = cache_line("BYPASS")
    named = exchange.note_answer(101, bypass)
    head = status_line(101) + lines + server.app.common_headers(exchange) + bypass + named + b"\r\n"
    exchange.answered = True
    exchange.on_gone = None
    client.write(head)
    near, far = ClientTunnelEnd(client.transport, server), TunnelEnd(connection.transport)
    near.other, far.other = far, near
    early = connection.take_over(far)
    held = client.detach(near)
    server.watch(near)
    if early:
        far.data_received(early)
    if held:
        near.data_received(held)


def _passes(name: bytes) -> bool:
    return (
        name not in RESPONSE_REPLACED
        and name != REQUEST_ID_HEADER
        and not name.startswith(b"access-control-")
    )
