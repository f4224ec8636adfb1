"""`--init`: streams that a file declares are there when the server is, and as it says or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.calls import Caller
from support.cli import tailrace
from support.server import ServerProcess
from support.workers import names_of
from tailrace.common.errors import TailraceError
from tailrace.server.startup import FILE_BYTES_MAX, STREAMS_MAX, load_declared_streams

NOTE = {"op": "add", "path": "/note", "schema": {"type": "string"}, "default": ""}
SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
DECLARED = """
[streams."orders/eu"]
content_type = "application/json"
ttl = "30d"
retention = "7d"
retention_bytes = "10GiB"
schema_file = "order.json"
routing_key = "/id"

[streams.events]
content_type = "application/json"
profile = "evlog"

[streams.notes]
content_type = "text/plain"

[streams.raw]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "order.json").write_text(json.dumps(SCHEMA))
    declared = tmp_path / "streams.toml"
    declared.write_text(DECLARED)
    return declared


@pytest.fixture
def server(file: Path, tmp_path: Path) -> ServerProcess:
    """Not started."""
    return ServerProcess(tmp_path / "data", args=["--init", str(file)])


def refusal(server: ServerProcess) -> str:
    """Why the server does not start."""
    done = tailrace("serve", "--port", "0", "--data-dir", str(server.data_dir), *server.args)
    assert done.code == 1, done.err
    return done.err


def test_they_are_there_from_the_first_request_on(server: ServerProcess) -> None:
    server.start()
    call = Caller(server)
    orders = call("HEAD", "orders/eu").headers
    assert orders["content-type"] == "application/json"
    assert orders["stream-ttl"] == str(30 * 86_400)
    assert (orders["stream-retention"], orders["stream-retention-bytes"]) == (
        str(7 * 86_400),
        str(10 * 2**30),
    )
    registry = call("GET", "orders/eu/_schema").body
    assert registry["schemas"]["1"] == SCHEMA
    assert registry["routingKey"] == {"jsonPointer": "/id", "required": False}
    assert call("POST", "orders/eu", [{"id": 7}]).status == 400
    assert call("POST", "orders/eu", [{"id": "one"}]).status == 204
    assert call("GET", "events/_profile").body["profile"]["kind"] == "evlog"
    assert call("HEAD", "raw").status == 200
    server.stop()


def test_a_start_with_the_same_file_changes_nothing(server: ServerProcess) -> None:
    server.start()
    call = Caller(server)
    call("POST", "orders/eu", [{"id": "one"}])
    call("POST", "raw", b"closing", headers={"Content-Type": "text/plain", "Stream-Closed": "true"})
    before = call("GET", "__registry__").raw
    server.restart()
    server.restart(kill=True)
    assert call("GET", "orders/eu").body == [{"id": "one"}]
    assert call("HEAD", "raw").headers["stream-closed"] == "true"
    assert call("GET", "__registry__").raw == before
    server.stop()


DIFFERENT = [
    ('ttl = "30d"', 'ttl = "1d"', "different lifetime"),
    ('retention = "7d"', "", "different lifetime"),
    ('"text/plain"', '"text/markdown"', "different content type"),
    ('profile = "evlog"', 'profile = "metrics"', "another profile (evlog)"),
    ('routing_key = "/id"', 'routing_key = "/other"', "another routing key"),
    ('schema_file = "order.json"', 'schema = { type = "object" }', "tailrace schema evolve"),
]


def test_a_stream_that_differs_stops_the_start(server: ServerProcess, file: Path) -> None:
    server.start()
    server.stop()
    for written, instead, said in DIFFERENT:
        assert written in DECLARED
        file.write_text(DECLARED.replace(written, instead))
        told = refusal(server)
        assert said in told
        assert str(file) in told
        assert re.search("stream '(orders/eu|events|notes)': ", told)
    file.write_text(DECLARED)
    server.start()
    server.stop()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[streams.a", "Expected"),
        ("[streams.a]\ncontent-type = 'x/y'", "content-type"),
        ("[streams.a]\nttl = true", "ttl"),
        ("[stream.a]", "stream"),
        ("x = '" + "y" * FILE_BYTES_MAX + "'", "must have at most"),
        ("\n".join(f"[streams.s{number}]" for number in range(STREAMS_MAX + 1)), "at most"),
    ],
    ids=("toml", "key", "type", "table", "size", "count"),
)
def test_a_file_that_cannot_be_read(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(TailraceError, match=said) as refused:
        load_declared_streams(file)
    assert str(file) in refused.value.message


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("[streams.__a]", "reserved"),
        ("[streams.'a/../b']", "a stream name must be"),
        ("[streams.a]\nttl = '3 days'", "ttl"),
        ("[streams.a]\nretention_bytes = 'many'", "whole number"),
        ("[streams.a]\nschema_file = 'missing.json'", "missing.json"),
        ("[streams.a]\ncontent_type = 'text/plain'\nschema = { type = 'object' }", "application/json"),
        ("[streams.a]\ncontent_type = 'application/json'\nprofile = 'none such'", "profile.kind"),
        ("[streams.a]\ncontent_type = 'application/json'\nschema = { type = 5 }", "schema"),
    ],
    ids=("reserved", "name", "ttl", "bytes", "missing", "type", "profile", "schema"),
)
def test_a_stream_that_cannot_be_made_stops_the_start(
    server: ServerProcess, file: Path, declared: str, said: str
) -> None:
    file.write_text(declared)
    told = refusal(server)
    assert said in told
    assert str(file) in told


def test_what_was_declared_wrongly_leaves_nothing_in_the_way(server: ServerProcess, file: Path) -> None:
    for wrong in ("content_type = 'text/plain'", "content_type = 'application/json'\nttl = '1d'"):
        file.write_text(f"[streams.a]\n{wrong}\nschema = {{ type = 5 }}")
        refusal(server)
    file.write_text("[streams.a]\ncontent_type = 'application/json'\nschema = { type = 'object' }")
    server.start()
    server.stop()


def test_a_file_that_is_not_there(server: ServerProcess, file: Path) -> None:
    file.unlink()
    assert str(file) in refusal(server)


def test_several_workers_make_them_together(server: ServerProcess, file: Path) -> None:
    server.args = (*server.args, "--workers", "2")
    server.start()
    call = Caller(server)
    names = [one["name"] for one in call("GET", "/v1/streams").body]
    assert names == ["events", "notes", "orders/eu", "raw"]
    assert call("POST", "orders/eu", [{"id": "one"}]).status == 204
    server.restart()
    assert call("GET", "orders/eu").body == [{"id": "one"}]
    server.stop()
    file.write_text(DECLARED.replace('ttl = "30d"', 'ttl = "1d"'))
    assert "different lifetime" in refusal(server)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_fork_is_not_made_again_as_a_stream(server: ServerProcess, file: Path, workers: str) -> None:
    """Whichever worker it lives on: its name belongs to one, its source to the other."""
    fork, source = (next(names_of(worker, 2, "pair/")) for worker in range(2))
    server.args = ("--workers", workers)
    server.start()
    call = Caller(server)
    assert call("PUT", source, [1]).status == 201
    assert call("PUT", fork, headers={"Stream-Forked-From": f"/v1/stream/{source}"}).status == 201
    server.stop()
    file.write_text(f'[streams."{fork}"]')
    server.args = ("--workers", workers, "--init", str(file))
    assert "different fork source" in refusal(server)
    file.write_text(f'[streams."{source}"]')
    server.start()
    assert call("GET", fork).body == [1]
    assert [one["name"] for one in call("GET", "/v1/streams").body] == sorted([fork, source])
    server.stop()


def test_streams_that_were_there_before_may_be_declared(server: ServerProcess, file: Path) -> None:
    server.args = ()
    server.start()
    call = Caller(server)
    call("PUT", "raw", headers={"Content-Type": "text/plain"})
    call("PUT", "events", headers={"Content-Type": "application/json"})
    server.stop()
    server.args = ("--init", str(file))
    server.start()
    assert call("HEAD", "raw").headers["content-type"] == "text/plain"
    assert call("GET", "events/_profile").body["profile"]["kind"] == "evlog"
    server.stop()


def test_the_next_version_of_a_schema_may_be_declared_once_it_is_there(
    server: ServerProcess, file: Path
) -> None:
    server.start()
    call = Caller(server)
    wider = {**SCHEMA, "properties": {**SCHEMA["properties"], "note": {"type": "string"}}}
    lens = {"apiVersion": "durable.lens/v1", "schema": "orders/eu", "from": 1, "to": 2, "ops": [NOTE]}
    assert call("POST", "orders/eu/_schema", {"schema": wider, "lens": lens}).status == 200
    server.stop()
    assert "tailrace schema evolve" in refusal(server)
    (file.parent / "order.json").write_text(json.dumps(wider))
    server.start()
    server.stop()
