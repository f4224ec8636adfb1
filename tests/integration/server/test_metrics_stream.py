"""`__stream_metrics__` on a real server: written, kept for a while, and nobody else's to write."""

from __future__ import annotations

import json
import re
from typing import Any

from conftest import StartServer
from support.calls import Caller, eventually
from support.sealing import SEALING_ENV
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset

JSON, NAME = "application/json", "__stream_metrics__"


def test_it_exists_before_the_first_flush(start_server: StartServer) -> None:
    http = Wire(start_server(env={"TAILRACE_METRICS_FLUSH_MS": "3600000"}).port)
    answer = http.get(f"{NAME}?offset=-1")
    assert (answer.status, answer.json) == (200, [])
    assert http.head(NAME)["stream-retention"] == str(7 * 86_400)
    shown = http.get(f"{NAME}/_details").json
    assert (shown["stream"]["profile"], shown["schema"]["currentVersion"]) == ("metrics", 1)
    http.close()


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
        return http.get(f"{NAME}?offset={encode_offset(0, 0)}").code == "offset_gone"

    eventually(trimmed, bool)
    # Just then all that there was may have been old; there will be more.
    oldest = eventually(lambda: http.get(f"{NAME}?offset=-1"), lambda answer: answer.json)
    assert oldest.status == 200
    http.close()


SERIES = {
    *(f"tieredstore.ingest.queue.{what}" for what in ("bytes", "requests", "limit.bytes")),
    *("tieredstore.ingest.failures", "tieredstore.ingest.flush.latency"),
    *(f"tieredstore.backpressure.{what}" for what in ("current.bytes", "limit.bytes", "over_limit")),
    *("process.rss.bytes", "process.rss.max.bytes", "process.memory.pressure", "process.cpu.seconds"),
    *("tieredstore.concurrency.active", "tieredstore.concurrency.limit", "tieredstore.concurrency.queued"),
    *(f"tieredstore.objectstore.{kind}.latency" for kind in ("put", "get", "head", "delete", "list")),
    *("tieredstore.append.bytes", "tieredstore.append.entries"),
    *("tieredstore.read.bytes", "tieredstore.read.entries"),
    *(f"tieredstore.index.{what}" for what in ("lag.segments", "quarantined.segments", "restarts")),
    *(f"tieredstore.upload.{what}" for what in ("segments", "bytes", "failures", "pending_streams")),
    *("tailrace.search.latency", "tailrace.search.timeouts", "tailrace.search.incomplete"),
    *(f"tailrace.tail_index.{what}" for what in ("bytes", "rows", "dropped_rows")),
    *(f"tailrace.touch.{what}" for what in ("waiters", "wakeups", "stale")),
}


# Names that dashboards know: those of the specification's section on this stream, and no others.
NAMES = (
    r"(tieredstore\.(ingest|backpressure|concurrency|index|upload)\.|process\.)[a-z_.]+"
    r"|tieredstore\.objectstore\.(put|get|head|delete|list)\.latency"
    r"|tieredstore\.(append|read)\.(bytes|entries)"
    r"|tailrace\.search\.(latency|timeouts|incomplete)"
    r"|tailrace\.tail_index\.(bytes|rows|dropped_rows)"
    r"|tailrace\.touch\.(waiters|wakeups|stale)"
    r"|tailrace\.metrics\.series_dropped"
)


def test_the_first_flush_tells_every_series_by_the_specified_names(start_server: StartServer) -> None:
    http = Wire(start_server(env={"TAILRACE_METRICS_FLUSH_MS": "50"}).port)
    rows = eventually(lambda: http.get(f"{NAME}?offset=-1"), lambda answer: answer.json).json
    told = {row["metric"] for row in rows}
    assert [name for name in sorted(told) if not re.fullmatch(NAMES, name)] == []
    assert told >= SERIES
    http.close()


def test_every_series_is_told(start_server: StartServer) -> None:
    server = start_server(env={**SEALING_ENV, "TAILRACE_METRICS_FLUSH_MS": "50"})
    http, call = Wire(server.port), Caller(server)
    http.put("busy", JSON)
    field = {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/id"}], "exact": True}
    update = {"schema": {}, "search": {"fields": {"id": field}}}
    assert http.post("busy/_schema", JSON, json.dumps(update)).status == 200
    offset = "-1"

    def rows() -> list[Any]:
        nonlocal offset
        http.post("busy", JSON, '[{"id":"a"}]')
        http.get("busy?offset=-1")
        http.post("busy/_search", JSON, '{"q":"id:a"}')
        assert call("POST", "busy/_search", {"q": "id:a", "timeout_ms": 0}).status == 408
        answer = http.get(f"{NAME}?offset={offset}")
        if answer.status != 200:
            return []
        offset = answer["stream-next-offset"]
        return answer.json

    told: dict[str, list[Any]] = {}

    def missing() -> set[str]:
        for row in rows():
            told.setdefault(row["metric"], []).append(row)
        return SERIES - set(told)

    def timeouts() -> int:
        assert not missing()
        return sum(row["sum"] for row in told["tailrace.search.timeouts"])

    eventually(missing, lambda left: not left)
    eventually(timeouts, lambda count: count >= 1)
    assert {row["stream"] for row in told["tieredstore.read.bytes"]} <= {"busy", "__other__"}
    assert sum(row["sum"] for row in told["tieredstore.read.bytes"] if row["stream"] == "__other__") == 0
    assert all(row["unit"] == "ms" for row in told["tailrace.search.latency"])
    http.close()
