"""Connections over the rate: told when to come back, in a form that a browser can read."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from conftest import StartServer
from support.calls import Caller, eventually
from support.hub_client import Actor
from support.hub_clients import OpenHub, open_hub
from support.server import ServerProcess
from tailrace.common.limits import Limits
from tailrace.hub.routes import REFUSED_BURST, ConnectionAdmission

__all__ = ["open_hub"]

SECOND_NS = 10**9
ATTEMPTS_MAX = 50


def refused(server: ServerProcess) -> tuple[Actor, dict[str, Any]]:
    """The first connection that is refused, and the message it was sent."""
    accepted: list[Actor] = []
    for _ in range(ATTEMPTS_MAX):
        actor = Actor(server, hello=False)
        with suppress(ConnectionClosed):  # it may be closed by now, and what it was told can still be read
            actor.socket.send('{"type":"ping"}')
        said = actor.take()
        if said != {"type": "pong"}:
            for one in accepted:
                one.close()
            return actor, said
        accepted.append(actor)
    raise AssertionError("no connection was refused")


def test_a_connection_over_the_rate_is_sent_retry_after_and_closed(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_HUB_CONNECTS_PER_S": "2"})
    actor, said = refused(server)
    assert (said["type"], said["correlationId"]) == ("hub:rate_limited", None)
    assert said["payload"]["retryAfter"] > 0
    assert said["payload"]["retryable"] is True
    assert actor.closed() == 1013
    counted = Caller(server)("GET", "/metrics").raw.decode()
    assert 'tailrace_hub_rate_limited_total{kind="connect"}' in counted


def test_one_connection_more_than_the_server_takes_is_refused_the_same_way(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_HUB_CONNECTIONS": "1"})
    first = Actor(server, "@(rate/first)")
    actor, said = refused(server)
    assert (said["type"], said["payload"]["details"]["reason"]) == ("hub:rate_limited", "connections")
    assert actor.closed() == 1013
    assert first.quiet() == [], "an open connection stays open"
    first.close()
    call = Caller(server)
    eventually(lambda: call("GET", "/metrics"), lambda reply: b"tailrace_hub_sessions 0" in reply.raw)
    assert Actor(server, "@(rate/next)").connected["type"] == "hub:connected"


def test_a_client_waits_for_retry_after_and_connects(start_server: StartServer, open_hub: OpenHub) -> None:
    server = start_server(env={"TAILRACE_HUB_CONNECTS_PER_S": "2"})
    refused(server)
    hub = open_hub(server.base_url)
    assert hub.register().actor_address == hub.identity


def test_what_refusing_costs_is_bounded(start_server: StartServer) -> None:
    """Beyond so many refused connections a second, the answer comes before the upgrade."""
    server = start_server(env={"TAILRACE_HUB_CONNECTS_PER_S": "1"})
    upgraded: list[Actor] = []
    with pytest.raises(InvalidStatus) as stopped:
        for _ in range(20 * REFUSED_BURST):
            upgraded.append(Actor(server, hello=False))  # none of them takes or answers anything
    response = stopped.value.response
    assert (response.status_code, json.loads(response.body or b"")["error"]["code"]) == (429, "overloaded")
    assert int(response.headers["Retry-After"]) >= 1
    assert Caller(server)("GET", "/hub/health").status == 200
    for actor in upgraded:
        actor.cut()


# -- the decision alone -------------------------------------------------------------------------------------


def test_a_hundred_connections_at_once_are_accepted_and_the_next_is_not() -> None:
    admission = ConnectionAdmission(Limits())
    decisions = [admission.decide("127.0.0.1", 0, 0) for _ in range(101)]
    assert decisions[:100] == [None] * 100
    last = decisions[100]
    assert last is not None
    assert last.retry_after_ms >= 10
    assert admission.decide("127.0.0.1", 0, SECOND_NS) is None


def test_one_address_that_floods_takes_nothing_from_the_others() -> None:
    admission = ConnectionAdmission(Limits())
    flood = [admission.decide("192.0.2.1", 0, 0) for _ in range(500)]
    assert sum(one is None for one in flood) == 100
    later = [admission.decide("192.0.2.1", 0, SECOND_NS // 2) for _ in range(500)]
    assert sum(one is None for one in later) == 10, "twenty a second"
    others = [admission.decide(f"198.51.100.{number}", 0, SECOND_NS // 2) for number in range(40)]
    assert others == [None] * 40, "what was refused to one address is left for others"


def test_one_address_that_floods_leaves_the_others_readable_refusals() -> None:
    admission = ConnectionAdmission(Limits(hub_connects_per_s=1))
    for _ in range(5000):
        admission.decide("192.0.2.1", 0, 0)
    other = admission.decide("198.51.100.1", 0, 0)
    assert other is not None
    assert other.over_socket
