"""What operators see of requests: the phases in Server-Timing, the counts in /metrics."""

from __future__ import annotations

import re
from collections import Counter

from conftest import StartServer
from support.calls import Caller, Reply
from support.edge import StartEdge
from support.server import ServerProcess
from tailrace.auth import create_token

SECRET = "a secret that is long enough for the tests of timing"
_PHASE = re.compile(r"([a-z]+);dur=(\d+\.\d{3})")
_REQUESTS = re.compile(
    r'^tailrace_requests_total\{method="(\w+)",status="(\d+)"\} (\d+(?:\.\d+)?)$', re.MULTILINE
)


def phases(reply: Reply) -> list[str]:
    """The names of the phases, in order; each has its milliseconds, and none took longer than the total."""
    found: list[tuple[str, str]] = []
    for part in reply.headers["server-timing"].split(", "):
        match = _PHASE.fullmatch(part)
        assert match is not None, part
        found.append((match[1], match[2]))
    total_ms = float(found[-1][1])
    assert all(float(duration_ms) <= total_ms for _, duration_ms in found)
    return [name for name, _ in found]


def counts(call: Caller) -> Counter[tuple[str, int]]:
    """Requests answered so far, by method and status."""
    text = call("GET", "/metrics").raw.decode()
    return Counter(
        {(method, int(status)): int(float(count)) for method, status, count in _REQUESTS.findall(text)}
    )


def test_phases_of_each_kind_of_request(start_server: StartServer) -> None:
    call = Caller(start_server("--server-timing"))
    assert phases(call("PUT", "a", headers={"Content-Type": "application/json"}))[-1] == "total"
    appended = call("POST", "a", [1])
    assert phases(appended) == ["commit", "total"]
    assert phases(call("GET", "a"))[-1] == "total"
    tail = appended.headers["stream-next-offset"]
    idle = call("GET", f"a?offset={tail}&live=long-poll&timeout_ms=50")
    assert idle.status == 204
    assert phases(idle) == ["wait", "total"]


def durations_ms(reply: Reply) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in re.findall(r"([a-z-]+);dur=([0-9.]+)", reply.headers["server-timing"])
    }


def test_durations_are_measured_in_microseconds(start_server: StartServer) -> None:
    """The clock of the loop moves once a turn, by whole milliseconds: most requests took 0.000 by it."""
    call = Caller(start_server("--server-timing"))
    assert call("PUT", "a", headers={"Content-Type": "application/json"}).status == 201
    timed = [durations_ms(call("POST", "a", [1])) for _ in range(20)]
    timed += [durations_ms(call("GET", "a")) for _ in range(20)]
    assert all(duration > 0 for phases in timed for duration in phases.values()), timed
    assert any(phases["total"] % 1 > 0.001 for phases in timed)


def test_durations_at_an_edge_are_measured_in_microseconds(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    server = start_server("--server-timing")
    assert Caller(server)("PUT", "a", [1]).status == 201
    call = Caller(start_edge(f"http://127.0.0.1:{server.port}", server_timing="true"))
    timed = [durations_ms(call("GET", "a", headers={"Cache-Control": "no-cache"})) for _ in range(20)]
    assert all(phases["edge-total"] > 0 and phases["edge-upstream"] > 0 for phases in timed), timed
    assert any(phases["edge-total"] % 1 > 0.001 for phases in timed)


def test_refusals_are_timed_too(start_server: StartServer) -> None:
    call = Caller(start_server("--server-timing"))
    missing = call("GET", "missing")
    assert (missing.status, phases(missing)) == (404, ["total"])


def test_checking_a_token_is_a_phase(start_server: StartServer) -> None:
    server = start_server("--server-timing", env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    call = Caller(server, create_token(SECRET, sub="test", scopes=["write"]))
    assert phases(call("PUT", "a", [1]))[0] == "auth"
    assert phases(call("POST", "a", [2])) == ["auth", "commit", "total"]


def test_without_the_setting_nothing_is_said(server: ServerProcess) -> None:
    assert "server-timing" not in Caller(server)("GET", "/healthz").headers


def test_requests_are_counted_by_method_and_status(start_server: StartServer) -> None:
    call = Caller(start_server())
    before = counts(call)
    call("PUT", "a", headers={"Content-Type": "application/json"})
    for _ in range(3):
        assert call("POST", "a", [1]).status == 204
    assert call("GET", "a").status == 200
    assert call("HEAD", "a").status == 200
    assert call("GET", "missing").status == 404
    assert call("POST", "a", b"{").status == 400
    assert call("DELETE", "a").status == 204
    # The request that asked for the first counts is answered, and so counted, after they were taken.
    assert counts(call) - before == Counter(
        {
            ("PUT", 201): 1,
            ("POST", 204): 3,
            ("GET", 200): 2,
            ("HEAD", 200): 1,
            ("GET", 404): 1,
            ("POST", 400): 1,
            ("DELETE", 204): 1,
        }
    )


def test_reads_by_spark_are_counted(start_server: StartServer) -> None:
    call = Caller(start_server())
    call("PUT", "a", headers={"Content-Type": "application/json"})
    agents = ["tailrace-spark/0.1.0", "tailrace-spark/0.1.0 query/6f1c", "python", "not tailrace-spark/0.1.0"]
    for agent in agents:
        assert call("GET", "a", headers={"User-Agent": agent}).status == 200
    assert "\ntailrace_spark_reads_total 2.0\n" in call("GET", "/metrics").raw.decode()


def test_refusals_are_counted_by_code_whenever_they_are_decided(start_server: StartServer) -> None:
    call = Caller(start_server())
    assert call("PUT", "a", [1]).status == 201
    assert call("POST", "a/_schema", {"schema": {"type": 5}}).code == "invalid_request"  # by a thread, later
    assert call("POST", "missing", [2]).code == "not_found"  # at once
    text = call("GET", "/metrics").raw.decode()
    assert 'tailrace_refused_total{code="invalid_request"} 1.0' in text
    assert 'tailrace_refused_total{code="not_found"} 1.0' in text
