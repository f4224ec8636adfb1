"""`/v1/server/_details` and `/v1/server/_mem`, automatic tuning, and a server that is short of memory."""

from __future__ import annotations

import json

import msgspec
import pytest

from conftest import StartServer
from support.calls import eventually
from support.server import HURRY
from support.wire import Wire, fresh, request_bytes
from tailrace.common.settings_loading import load_settings

JSON, TEXT = "application/json", "text/plain"
MIB = 1 << 20


def test_the_groups_of_server_details(http: Wire) -> None:
    answer = http.get("/v1/server/_details")
    assert answer["cache-control"] == "no-store"
    shown = answer.json
    assert list(shown) == ["auto_tune", "configured_limits", "runtime"]
    assert shown["auto_tune"] == {
        "enabled": False,
        "requested_memory_mb": None,
        "preset_mb": None,
        "effective_memory_limit_mb": None,
    }
    groups = shown["configured_limits"]
    assert list(groups) == ["caches", "concurrency", "ingest", "search", "segmenting", "timeouts", "memory"]
    told = {name: value for group in groups.values() for name, value in group.items()}
    # As all servers of the tests, which have patience.
    limits = msgspec.structs.asdict(load_settings(env={**HURRY, "TAILRACE_METRICS_FLUSH_MS": "0"}).limits)
    assert told.keys() == limits.keys() | {"pressure_limit_bytes"}
    assert {name: told[name] for name in limits} == limits
    runtime = shown["runtime"]
    assert list(runtime) == [
        "memory",
        "ingest_queue",
        "local_backpressure",
        "uploads",
        "concurrency",
        "top_streams",
        "pipeline",
    ]
    assert list(runtime["concurrency"]) == ["ingest", "read", "search", "async_index"]
    memory = runtime["memory"]
    assert memory["max_rss_bytes"] >= memory["last_rss_bytes"] > 10 * MIB
    assert memory["process"]["heap_total_bytes"] >= memory["process"]["heap_used_bytes"] > MIB
    assert memory["process_breakdown"]["unattributed_rss_bytes"] >= 0
    assert memory["totals"]["configured_budget_bytes"] == sum(
        memory["subsystems"]["configured_budgets"].values()
    )
    assert set(memory["high_water"]["rss_bytes"]) == {"value", "at"}
    assert memory["sqlite"]["available"] is True
    # Python and its libraries alone are some MiB of mapped files.
    mapped = memory["subsystems"]["mapped_files"]["resident_bytes"]
    assert memory["process_breakdown"]["mapped_file_bytes"] > MIB
    assert memory["totals"]["mapped_file_bytes"] == mapped > MIB
    assert memory["gc"]["collections"] >= 0
    assert memory["gc"]["frozen_objects"] > 10_000
    assert (memory["gc"]["forced_collections"], memory["gc"]["last_forced_at"]) == (0, None)


def test_the_groups_of_mem(http: Wire) -> None:
    shown = http.get("/v1/server/_mem").json
    assert list(shown) == [
        "ts",
        "process",
        "process_breakdown",
        "sqlite",
        "gc",
        "high_water",
        "counters",
        "runtime_counts",
        "runtime_bytes",
        "runtime_totals",
        "top_streams",
    ]
    assert "counts" not in shown["runtime_bytes"]
    assert set(shown["runtime_totals"]) == {
        "heap_estimate_bytes",
        "mapped_file_bytes",
        "disk_cache_bytes",
        "configured_budget_bytes",
        "pipeline_buffer_bytes",
        "sqlite_runtime_bytes",
    }


def test_the_busiest_streams_are_told(http: Wire) -> None:
    name, quiet = fresh("busy"), fresh("busy")
    http.put(name, TEXT, "x" * 500_000)
    http.put(quiet, TEXT)

    def largest() -> list[str]:
        rows = http.get("/v1/server/_mem").json["top_streams"]["pending_wal_bytes"]
        assert len(rows) <= 10
        return [row["stream"] for row in rows if row["bytes"] >= 500_000]

    eventually(largest, lambda names: name in names)
    with http.connect() as connection:
        path = f"/v1/stream/{quiet}?offset=now&live=long-poll&timeout=4s"
        connection.send(request_bytes("GET", path))

        def waiters() -> list[str]:
            rows = http.get("/v1/server/_details").json["runtime"]["top_streams"]["notifier_waiters"]
            return [row["stream"] for row in rows]

        eventually(waiters, lambda names: quiet in names)
        http.post(quiet, TEXT, "now")
        assert connection.read_answer().status == 200


def test_documents_contracts_and_touches_are_part_of_memory(http: Wire) -> None:
    name = fresh("state")
    http.put(name, JSON)
    profile = {"profile": {"kind": "state-protocol", "touch": {"enabled": True}}}
    assert http.post(f"{name}/_profile", JSON, json.dumps(profile)).status == 200
    assert http.post(f"{name}/_schema", JSON, '{"schema":{"type":"object"}}').status == 200
    assert http.get(f"{name}/touch/meta").status == 200
    change = {"type": "t", "key": "k", "value": {"a": 1}, "headers": {"operation": "insert"}}
    assert http.post(name, JSON, json.dumps(change)).status == 204
    assert http.get(f"{name}/touch/meta?settle=flush").json["settled"] is True
    shown = http.get("/v1/server/_mem").json
    held = shown["runtime_bytes"]["heap_estimates"]
    assert held["document_bytes"] > 50
    assert held["contract_bytes"] > 50
    rows = shown["top_streams"]["touch_journal_filter_bytes"]
    assert name in [row["stream"] for row in rows]
    assert held["touch_journal_bytes"] >= rows[0]["bytes"] > 0
    assert shown["high_water"]["document_bytes"]["value"] >= 0


@pytest.mark.parametrize("path", ["/v1/server/_details", "/v1/server/_mem"])
def test_only_asking_is_allowed(http: Wire, path: str) -> None:
    assert http.call("POST", path).code == "method_not_allowed"
    assert http.call("HEAD", path).status == 200


def test_auto_tune_is_told_and_used(start_server: StartServer) -> None:
    server = start_server(
        "--auto-tune=700", env={"TAILRACE_SEARCH_WAL_OVERLAY_ROWS": "5", "TAILRACE_PROT": "1"}
    )
    http = Wire(server.port)
    shown = http.get("/v1/server/_details").json
    assert shown["auto_tune"] == {
        "enabled": True,
        "requested_memory_mb": 700,
        "preset_mb": 512,
        "effective_memory_limit_mb": 512,
    }
    assert shown["configured_limits"]["ingest"]["tail_memory_max_bytes"] == 64 * MIB
    assert shown["runtime"]["memory"]["pressure_limit_bytes"] == 512 * MIB
    assert "TAILRACE_SEARCH_WAL_OVERLAY_ROWS has no effect" in server.log
    assert "TAILRACE_PROT is not a setting; did you mean TAILRACE_PORT?" in server.log
    http.close()


def test_nothing_is_taken_in_when_memory_is_used_up(start_server: StartServer) -> None:
    server = start_server(data_dir=None)
    http = Wire(server.port)
    http.put("s", TEXT, "kept")
    http.close()
    server.stop()
    server.args = ("--memory-limit-bytes", "1MiB")
    server.start(ready=False)
    eventually(lambda: server.status("/healthz"), lambda status: status == 200)
    http = Wire(server.port)
    refused = eventually(lambda: http.post("s", TEXT, "more"), lambda answer: answer.status == 429)
    assert int(refused["retry-after"]) >= 1
    assert http.get("s?offset=-1").body.startswith(b"kept")
    assert http.delete("s").status == 204
    http.close()
