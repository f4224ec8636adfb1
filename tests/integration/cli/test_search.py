"""``tailrace search``, as a user runs it against a real server."""

from __future__ import annotations

import json
import shlex

import pytest

from support.calls import Caller
from support.cli import Finished, tailrace
from support.search_model import search_body
from support.server import ServerProcess

JSON = "application/json"


@pytest.fixture(scope="module", autouse=True)
def _events(server: ServerProcess) -> None:
    call = searchable(server, "ev")
    records = [
        {"id": f"r{n}", "status": n, "message": f"payment {'failed' if n % 2 else 'fine'}"} for n in range(6)
    ]
    assert call("POST", "ev", records).status == 204


def searchable(server: ServerProcess, name: str) -> Caller:
    call = Caller(server)
    assert call("PUT", name, headers={"Content-Type": JSON}).status == 201
    assert call("POST", f"{name}/_schema", {"schema": {}, "search": search_body()}).status == 200
    return call


def search(server: ServerProcess, *args: str, stream: str = "ev") -> Finished:
    return tailrace("search", stream, *args, "--url", server.base_url)


def test_hits_are_a_table_and_the_rest_is_told_beside_it(server: ServerProcess) -> None:
    done = search(server, "failed", "--size", "2")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split()[:2] == ["score", "id"]
    assert len(lines) == 3
    assert lines[1].split()[1] == "r5"
    assert "2 of 3 in " in done.err
    assert "next page: --after '[" in done.err
    after = shlex.split(done.err.splitlines()[1])[-1]
    rest = search(server, "failed", "--size", "2", "--after", after)
    assert rest.out.splitlines()[1].split()[1] == "r1"
    assert "1 of 3 in " in rest.err


def test_fields_of_the_query_come_first(server: ServerProcess) -> None:
    done = search(server, "status:>=2", "--sort", "status:asc")
    assert done.out.splitlines()[0].split()[0] == "status"


def test_json_is_one_hit_per_line(server: ServerProcess) -> None:
    done = search(server, "status:>=2", "--sort", "status:asc", "--sort", "offset:desc", "--json")
    assert [hit["source"]["status"] for hit in done.rows] == [2, 3, 4, 5]


def test_records_come_as_they_were_written(server: ServerProcess) -> None:
    searchable(server, "odd")
    record = '{"id": "odd", "big": 123456789012345678901234567890, "cut": "\\ud83d"}'
    assert tailrace("append", "odd", record, "--url", server.base_url).code == 0
    assert f'"source":{record}' in search(server, "id:odd", "--json", stream="odd").out
    assert "odd" in search(server, "id:odd", stream="odd").out


def test_nothing_found_no_time_and_refusals(server: ServerProcess) -> None:
    nothing = search(server, "id:nobody")
    assert (nothing.code, nothing.out) == (0, "")
    assert "0 of 0 in " in nothing.err
    hasty = search(server, "failed", "--timeout-ms", "0")
    assert hasty.code == 3
    assert "INCOMPLETE ANSWER: 6 rows were not examined in time" in hasty.err.splitlines()[-1]
    told = json.loads(search(server, "failed", "--timeout-ms", "0", "--json").err.splitlines()[-1])
    assert told["error"]["code"] == "incomplete"
    refused = search(server, "nobody:x")
    assert refused.code == 1
    assert "unknown search field nobody" in refused.err
    assert search(server, "x", "--after", "[").code == 1
    assert tailrace("search", "ev", "x", "--url", "http://127.0.0.1:1").code == 4
