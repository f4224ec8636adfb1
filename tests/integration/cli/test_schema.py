"""`tailrace schema` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.cli import Finished, tailrace
from support.schema_versions import RENAME, V1, V2
from support.server import ServerProcess
from support.wire import Wire

OPS = [RENAME]
SEARCH = {
    "fields": {"at": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/at"}], "exact": True}}
}


def test_a_schema_is_set_evolved_and_shown(server: ServerProcess, tmp_path: Path) -> None:
    def on(*args: str, stdin: Any = None) -> Finished:
        raw = b"" if stdin is None else json.dumps(stdin).encode()
        return tailrace(*args, stdin=raw, env={"TAILRACE_ENDPOINT": server.base_url})

    def file(name: str, value: Any) -> str:
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    stream = "cli/schema"
    refused = on("schema", "get", stream)
    assert (refused.code, "there is no stream" in refused.err) == (1, True)
    assert tailrace("schema", "get", stream, "--url", "http://127.0.0.1:1").code == 4
    on("append", stream, "1", "--create")
    refused = on("schema", "set", stream, "--schema", file("v1.json", V1))
    assert (refused.code, "first schema requires empty stream" in refused.err) == (1, True)

    refused = on("schema", "set", stream, "--schema", file("v1.json", V1), "--adopt")
    assert (refused.code, "does not fit" in refused.err) == (1, True)
    adopted = on("schema", "set", stream, "--schema", file("any.json", {}), "--adopt", "--json")
    assert (adopted.code, adopted.rows[0]["boundaries"]) == (0, [{"offset": 0, "version": 1}])
    on("append", "cli/changes", "1", "--create")
    refused = on("profile", "set", "cli/changes", "state-protocol", "--adopt")
    assert (refused.code, "state-protocol records must be JSON objects" in refused.err) == (1, True)

    stream = "cli/schema/evolved"
    http = Wire(server.port)
    assert http.put(stream, "application/json").status == 201
    http.close()
    first = on("schema", "set", stream, "--schema", "-", "--routing-key", "/ts", "--required", stdin=V1)
    assert first.code == 0, first.err
    assert json.loads(first.out)["routingKey"] == {"jsonPointer": "/ts", "required": True}
    on("append", stream, '{"ts": "x"}')
    evolve = ("schema", "evolve", stream, "--schema", file("v2.json", V2), "--lens", file("ops.json", OPS))
    (second,) = on(*evolve, "--search", file("search.json", SEARCH), "--json").rows
    assert (second["currentVersion"], second["lenses"]["1"]["ops"]) == (2, OPS)
    assert set(second["search"]["fields"]) == {"at"}
    assert on("read", stream).out == '{"at":"x"}\n'
    (third,) = on("schema", "set", stream, "--routing-key", "none", "--search", "none", "--json").rows
    assert set(third) & {"routingKey", "search"} == set()
    assert json.loads(on("schema", "get", stream).out) == third
    for wrong in (
        ("schema", "set", stream),
        ("schema", "set", stream, "--required", "--schema", "x"),
        ("schema", "set", stream, "--schema", str(tmp_path / "absent")),
        ("schema", "set", stream, "--schema", file("bad.json", "{")),
    ):
        assert on(*wrong).code == 2
