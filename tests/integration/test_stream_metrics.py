"""`__stream_metrics__` on a real server: written, kept for a while, and nobody else's to write."""

from __future__ import annotations

from conftest import StartServer
from support.calls import eventually
from support.sealing import SEALING_ENV
from support.wire import Wire
from tailrace.protocol.offsets import encode

JSON, NAME = "application/json", "__stream_metrics__"


def test_it_is_written_and_read_like_any_stream(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_METRICS_FLUSH_MS": "50"})
    http = Wire(server.port)
    http.put("busy", JSON, "[1,2,3]")

    def told() -> list[str]:
        answer = http.get(f"{NAME}?offset=-1")
        return [row["stream"] for row in answer.json if row["stream"]] if answer.status == 200 else []

    eventually(told, lambda streams: "busy" in streams)
    head = http.head(NAME)
    assert head["stream-retention"] == str(7 * 86_400)
    shown = http.get(f"{NAME}/_details").json
    assert (shown["stream"]["profile"], shown["schema"]["currentVersion"]) == ("metrics", 1)
    assert "search" not in shown["schema"]
    assert "routingKey" not in shown["schema"]
    assert http.get(f"{NAME}/_routing_keys").code == "invalid_request"
    for method in ("POST", "PUT", "DELETE"):
        answer = http.call(method, NAME, {"Content-Type": JSON}, b"[{}]")
        assert (answer.status, answer.code) == (405, "read_only_stream")
    assert NAME not in http.get("/v1/streams?limit=1000").body.decode()
    http.close()


def test_x2_what_is_old_is_dropped(start_server: StartServer) -> None:
    env = {**SEALING_ENV, "TAILRACE_METRICS_FLUSH_MS": "30", "TAILRACE_METRICS_RETENTION": "1s"}
    server = start_server(env=env)
    http = Wire(server.port)
    http.put("busy", JSON)

    def trimmed() -> bool:
        http.post("busy", JSON, "[1]")
        return http.get(f"{NAME}?offset={encode(0, 0)}").code == "offset_gone"

    eventually(trimmed, bool)
    oldest = http.get(f"{NAME}?offset=-1")
    assert oldest.status == 200
    assert oldest.json
    http.close()
