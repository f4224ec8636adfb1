"""What is derived can be lost: answers come later then, and are the same."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from typing import Any

from conftest import StartServer
from support.aggregate_model import rollup_search
from support.calls import Caller, eventually
from support.sealing import SEALING_ENV, wait_sealed
from support.server import ServerProcess
from support.wire import Wire

JSON = "application/json"
NOON = 1767225600000
RECORDS: list[Any] = [
    {"at": NOON + n, "id": f"r{n}", "service": "ab"[n % 2], "status": n % 3, "ratio": n, "message": "fine"}
    for n in range(30)
]
AGGREGATE = {"rollup": "all", "from": NOON, "to": NOON + 100, "interval": "7ms", "group_by": ["service"]}
DERIVED = ("companions", "plans")


def answers(server: ServerProcess) -> list[Any]:
    """One answer of each kind, without what they say about the way they were found."""
    call = Caller(server)

    def asked(path: str, body: Any) -> Any:
        """Right after a start it may take more time than a search has."""
        answer = eventually(lambda: call("POST", path, body), lambda reply: reply.status == 200).body
        assert answer["coverage"]["complete"] is True
        return answer

    searches = [
        {"q": "fine", "size": 7, "sort": ["_score", "offset:asc"]},
        {"q": "service:a status:>=1 -id:r4", "sort": ["ratio:desc"]},
    ]
    found: list[Any] = []
    for body in searches:
        answer = asked("ev/_search", body)
        found.append([answer["hits"], answer["total"], answer["next_search_after"]])
    found.append(asked("ev/_aggregate", AGGREGATE)["buckets"])
    found.append(call("GET", "ev?offset=-1&filter=status:1").raw)
    found.append(call("GET", "ev?offset=-1&key=r7").raw)
    found.append(call("GET", "ev/_routing_keys?limit=500").body["keys"])
    return found


def test_m3_losing_everything_that_is_derived_changes_no_answer(start_server: StartServer) -> None:
    server = start_server(env=SEALING_ENV)
    http = Wire(server.port)
    assert http.put("ev", JSON).status == 201
    routing = {"jsonPointer": "/id", "required": False}
    body = {"schema": {}, "search": rollup_search(), "routingKey": routing}
    assert http.post("ev/_schema", JSON, json.dumps(body)).status == 200
    assert http.post("ev", JSON, json.dumps(RECORDS)).status == 204
    before = answers(server)
    assert [len(one) > 0 for one in before] == [True] * len(before)
    assert http.call("POST", "/v1/server/_seal").json == {"sealed": True}
    wait_sealed(server.data_dir)
    assert answers(server) == before
    http.close()
    server.stop()
    shutil.rmtree(server.data_dir / "cache", ignore_errors=True)
    for name in DERIVED:
        for directory in list((server.data_dir / "objects").rglob(name)):
            shutil.rmtree(directory)
    server.start()
    assert answers(server) == before


def test_a_segment_that_is_lost_is_refused_and_counted(start_server: StartServer) -> None:
    server = start_server(env=SEALING_ENV)
    with closing(Wire(server.port)) as http:
        assert http.put("ev", JSON).status == 201
        assert http.post("ev", JSON, json.dumps(RECORDS)).status == 204
        assert http.call("POST", "/v1/server/_seal").json == {"sealed": True}
    wait_sealed(server.data_dir)
    server.stop()
    shutil.rmtree(server.data_dir / "cache", ignore_errors=True)
    for directory in list((server.data_dir / "objects").rglob("segments")):
        shutil.rmtree(directory)
    server.start()
    with closing(Wire(server.port)) as http:
        assert http.get("ev?offset=-1").status == 503
        counted = re.search(rb"\ntailrace_cold_failures_total (\S+)", http.call("GET", "/metrics").body)
        assert counted is not None
        assert float(counted[1]) > 0
    eventually(lambda: server.log, lambda log: "cannot read segment" in log)
