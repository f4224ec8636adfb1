"""Retention: what is over a bound goes, readers are told, and what forks show stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from conftest import StartServer
from support.cli import tailrace
from support.retention import (
    ENTRY_BYTES,
    TEXT,
    append,
    earliest,
    folder,
    stored,
    text_of,
    texts,
    wait_deleted,
    wait_idle,
    wait_trimmed,
)
from support.sealing import SEALING_ENV, wait_until
from support.server import ServerProcess
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset, parse_offset

DAY_S = 86_400
SECOND_NS = 10**9
# Three entries make a segment, so a bound of five entries leaves at most seven of them.
BOUND = {"stream_retention_bytes": str(5 * ENTRY_BYTES)}
LARGE = {"stream_retention_bytes": str(10**9)}
ZEROS = ("0" * 26, "0000000000000000_0000000000000000")


@pytest.fixture
def server(start_server: StartServer) -> ServerProcess:
    return start_server(env=SEALING_ENV)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Wire]:
    wire = Wire(server.port)
    yield wire
    wire.close()


def trimmed_stream(server: ServerProcess, http: Wire, name: str) -> int:
    """A stream of 30 entries of which only the newest are left; how many went."""
    assert http.put(name, TEXT, **BOUND).status == 201
    append(http, name, 1, 30)
    gone = wait_trimmed(http, server.data_dir, name, 30)
    assert 5 <= 30 - gone <= 7
    return gone


def check_verified(server: ServerProcess) -> None:
    done = tailrace("verify", "--data-dir", str(server.data_dir))
    assert done.code == 0, done.out + done.err


# -- answers -------------------------------------------------------------------------------------------


def test_reads_begin_at_the_earliest_entry_and_offsets_before_it_are_gone(
    server: ServerProcess, http: Wire
) -> None:
    gone = trimmed_stream(server, http, "a")
    start, tail = encode_offset(0, gone), encode_offset(0, 30)
    for query in ("", "?offset=-1", "?since=1", f"?offset={start}", "?since=2001-01-01T00:00:00Z"):
        answer = http.get(f"a{query}")
        assert (answer.status, answer.body) == (200, texts(gone + 1, 30))
        assert (answer["stream-earliest-offset"], answer["stream-next-offset"]) == (start, tail)
        assert answer["etag"].startswith(f'W/"slice:{start}:{tail}:')
    for offset in (*ZEROS, *(encode_offset(0, entry) for entry in range(1, gone))):
        for live in ("", "&live=long-poll", "&live=true", "&live=sse", "&live=ws"):
            answer = http.get(f"a?offset={offset}{live}")
            assert (answer.status, answer.code) == (410, "offset_gone")
            assert answer.json["error"]["earliest_offset"] == answer["stream-earliest-offset"] == start
            assert answer["cache-control"] == "no-store"
    for entry in range(gone, 31):
        assert http.get(f"a?offset={encode_offset(0, entry)}").body == texts(entry + 1, 30)
    now = http.get("a?offset=now")
    assert (now.body, now["stream-earliest-offset"]) == (b"", start)
    # A fresh tag does not help somebody who asks for what is gone.
    assert http.get(f"a?offset={ZEROS[0]}", {"If-None-Match": "*"}).status == 410
    assert http.get("a?offset=-1", {"If-None-Match": "*"}).status == 304


def test_live_readers_begin_at_the_earliest_entry(server: ServerProcess, http: Wire) -> None:
    gone = trimmed_stream(server, http, "a")
    start = encode_offset(0, gone)
    answer = http.get("a?offset=-1&live=long-poll")
    assert (answer.status, answer.body, answer["stream-earliest-offset"]) == (200, texts(gone + 1, 30), start)
    idle = http.get("a?offset=now&live=long-poll&timeout_ms=1")
    assert (idle.status, idle["stream-earliest-offset"]) == (204, start)
    with http.events("a?offset=-1&live=sse") as events:
        assert events.head["stream-earliest-offset"] == start
        assert events.next() == ("data", texts(gone + 1, 30))
    url = f"ws://127.0.0.1:{http.port}/v1/stream/a?live=ws&offset="
    with connect(f"{url}-1") as follower:
        assert text_of(gone + 1) in str(follower.recv())
    with pytest.raises(InvalidStatus) as refused, connect(url + ZEROS[0]):
        pass
    assert refused.value.response.status_code == 410


def test_what_was_never_trimmed_says_so_only_on_head(http: Wire) -> None:
    assert http.put("a", TEXT, **LARGE).status == 201
    append(http, "a", 1, 4)
    assert http.head("a")["stream-earliest-offset"] == ZEROS[0]
    for query in ("", "?offset=now", "?offset=now&live=long-poll&timeout_ms=1"):
        assert "stream-earliest-offset" not in http.get(f"a{query}")
    assert http.get(f"a?offset={ZEROS[1]}").body == texts(1, 4)


def test_a_trimmed_stream_goes_on(server: ServerProcess, http: Wire) -> None:
    gone = trimmed_stream(server, http, "a")
    assert http.put("a", TEXT, **BOUND).status == 200
    listed = http.call("GET", "/v1/streams").json[0]
    assert (listed["earliest_offset"], listed["end_offset"]) == (encode_offset(0, gone), encode_offset(0, 30))
    assert int(listed["total_size_bytes"]) == ENTRY_BYTES * (30 - gone)
    append(http, "a", 31, 60)
    gone = wait_trimmed(http, server.data_dir, "a", 60)
    assert http.get("a").body == texts(gone + 1, 60)
    wait_deleted(server.data_dir, "a", set(range(gone + 1, 61)))
    wait_idle(server.data_dir)
    check_verified(server)
    for kill in (False, True):
        http.close()
        server.restart(kill=kill)
        assert earliest(http, "a") == gone
        assert http.get("a").body == texts(gone + 1, 60)
        assert http.get(f"a?offset={ZEROS[0]}").code == "offset_gone"


def test_nothing_that_is_within_the_bounds_goes(server: ServerProcess, http: Wire) -> None:
    assert http.put("a", TEXT, stream_retention="1d", **LARGE).status == 201
    assert http.put("b", TEXT, **BOUND).status == 201
    append(http, "a", 1, 12)
    append(http, "b", 1, 12)
    wait_trimmed(http, server.data_dir, "b", 12)
    wait_idle(server.data_dir)
    assert earliest(http, "a") == 0
    assert stored(server.data_dir, "a") == set(range(1, 13))


# -- age -----------------------------------------------------------------------------------------------


def test_entries_go_when_they_are_too_old(server: ServerProcess, http: Wire) -> None:
    old_ns = time.time_ns() - 2 * DAY_S * SECOND_NS
    assert http.put("a", TEXT, stream_retention="1d").status == 201
    append(http, "a", 1, 6, stream_timestamp=str(old_ns))
    wait_until(lambda: earliest(http, "a") == 6, "old entries gone")
    append(http, "a", 7, 9)
    answer = http.get("a")
    assert answer.body == texts(7, 9)
    answer = http.get(f"a?offset={encode_offset(0, 6)}")
    assert (answer.body, answer["stream-earliest-offset"]) == (texts(7, 9), encode_offset(0, 6))
    wait_deleted(server.data_dir, "a", {7, 8, 9})
    assert earliest(http, "a") == 6


def test_entries_that_grow_old_go_by_themselves_and_an_empty_stream_remains(http: Wire) -> None:
    assert http.put("a", TEXT, stream_retention="1").status == 201
    append(http, "a", 1, 4)
    wait_until(lambda: earliest(http, "a") == 4, "all gone")
    answer = http.get("a")
    assert (answer.status, answer.body, answer["stream-up-to-date"]) == (200, b"", "true")
    assert answer["stream-next-offset"] == answer["stream-earliest-offset"] == encode_offset(0, 4)
    assert http.get(f"a?offset={encode_offset(0, 3)}").code == "offset_gone"
    append(http, "a", 5, 5)
    assert http.get("a?offset=-1").body in (texts(5, 5), b"")
    assert http.head("a")["stream-next-offset"] == encode_offset(0, 5)


def test_a_bound_seals_what_nothing_else_would(start_server: StartServer) -> None:
    lazy = {**SEALING_ENV, "TAILRACE_SEAL_AGE_MS": "1h", "TAILRACE_SEAL_ENTRIES": "100000"}
    server = start_server(env=lazy)
    http = Wire(server.port)
    assert http.put("aged", TEXT, stream_retention="1").status == 201
    assert http.put("sized", TEXT, **BOUND).status == 201
    assert http.put("unbounded", TEXT).status == 201
    append(http, "unbounded", 1, 4)
    append(http, "aged", 1, 4)
    wait_until(lambda: earliest(http, "aged") == 4, "old entries gone")
    count = 0
    while not earliest(http, "sized"):
        count += 1
        assert count < 5000, "nothing was ever trimmed"
        append(http, "sized", count, count)
    gone = earliest(http, "sized")
    assert http.get("sized").body == texts(gone + 1, count)
    assert count - gone >= 5
    wait_deleted(server.data_dir, "aged", set())
    assert not stored(server.data_dir, "unbounded")
    http.close()


def test_caches_hold_pages_no_longer_than_the_window(http: Wire) -> None:
    assert http.put("a", TEXT, stream_retention="90", stream_closed="true", body="x").status == 201
    assert http.get("a")["cache-control"] == "public, max-age=90"
    assert http.put("b", TEXT, stream_retention="0", stream_closed="true", body="x").status == 201
    assert http.get("b")["cache-control"] == "no-store"


# -- forks ---------------------------------------------------------------------------------------------


def fork(http: Wire, name: str, source: str, entry: int | None = None, **more: str) -> int | None:
    headers = {"stream_forked_from": f"/v1/stream/{source}", **more}
    if entry is not None:
        headers["stream_fork_offset"] = encode_offset(0, entry)
    return http.put(name, **headers).status


def test_a_fork_shows_what_its_source_has_trimmed(server: ServerProcess, http: Wire) -> None:
    assert http.put("a", TEXT, **BOUND).status == 201
    append(http, "a", 1, 4)
    assert fork(http, "f", "a", 3, **LARGE) == 201
    append(http, "a", 5, 40)
    gone = wait_trimmed(http, server.data_dir, "a", 40)
    # Stored is what the source shows, what the fork shows, and nothing in between.
    wait_deleted(server.data_dir, "a", {1, 2, 3} | set(range(gone + 1, 41)))
    assert http.get("f").body == texts(1, 3)
    assert earliest(http, "f") == 0
    append(http, "f", 4, 6)
    assert http.get("f").body == texts(1, 6)
    assert http.get(f"f?offset={encode_offset(0, 2)}").body == texts(3, 6)
    assert http.get("a").body == texts(gone + 1, 40)
    wait_idle(server.data_dir)
    check_verified(server)
    http.close()
    server.restart(kill=True)
    assert http.get("f").body == texts(1, 6)
    append(http, "a", 41, 50)
    gone = wait_trimmed(http, server.data_dir, "a", 50)
    assert http.get("f?since=1").body == texts(1, 6)
    # Without the fork nobody needs them.
    assert http.delete("f").status == 204
    wait_deleted(server.data_dir, "a", set(range(gone + 1, 51)))
    assert http.get("a").body == texts(gone + 1, 50)
    wait_idle(server.data_dir)
    check_verified(server)


def test_forks_of_forks_and_of_soft_deleted_streams_keep_what_they_show(
    server: ServerProcess, http: Wire
) -> None:
    assert http.put("a", TEXT, **BOUND).status == 201
    append(http, "a", 1, 4)
    assert fork(http, "f", "a", 4, **LARGE) == 201
    append(http, "f", 5, 6)
    assert fork(http, "g", "f", 5, **LARGE) == 201
    append(http, "a", 5, 30)
    gone = wait_trimmed(http, server.data_dir, "a", 30)
    assert http.delete("f").status == 204
    wait_deleted(server.data_dir, "a", {1, 2, 3, 4} | set(range(gone + 1, 31)))
    wait_idle(server.data_dir)
    assert http.get("g").body == texts(1, 5)
    assert http.delete("a").status == 204
    assert http.get("a").status == 410
    wait_idle(server.data_dir)
    assert http.get("g").body == texts(1, 5)
    assert http.delete("g").status == 204
    for name in ("a", "f", "g"):
        wait_until(lambda name=name: not stored(server.data_dir, name), f"objects of {name} gone")
        assert http.get(name).status == 404


def test_a_fork_has_bounds_of_its_own_on_what_it_inherits(server: ServerProcess, http: Wire) -> None:
    assert http.put("a", TEXT).status == 201
    append(http, "a", 1, 12)
    assert fork(http, "f", "a", 10, **BOUND) == 201
    # Five entries are kept; the segment that the fork point cuts counts for nothing.
    append(http, "f", 11, 16)
    gone = wait_trimmed(http, server.data_dir, "f", 16)
    assert http.get("f").body == texts(gone + 1, 16)
    assert http.get("a").body == texts(1, 12)
    assert http.get(f"f?offset={encode_offset(0, gone - 1)}").code == "offset_gone"
    append(http, "f", 17, 40)
    gone = wait_trimmed(http, server.data_dir, "f", 40)
    assert http.get("f").body == texts(gone + 1, 40)
    assert stored(server.data_dir, "a") == set(range(1, 13))
    # A fork of it cannot begin before it does.
    assert fork(http, "g", "f", gone - 1) == 410
    assert fork(http, "g", "f", gone) == 201
    wait_idle(server.data_dir)
    check_verified(server)


def test_forking_a_trimmed_stream(server: ServerProcess, http: Wire) -> None:
    gone = trimmed_stream(server, http, "a")
    start = encode_offset(0, gone)
    below = http.put("f", stream_forked_from="/v1/stream/a", stream_fork_offset=encode_offset(0, gone - 1))
    assert (below.status, below.code, below["stream-earliest-offset"]) == (410, "offset_gone", start)
    for name, entry in (("f", gone), ("g", gone + 2), ("h", None)):
        assert fork(http, name, "a", entry, **LARGE) == 201
        assert http.head(name)["stream-earliest-offset"] == start
        assert http.get(name).body == texts(gone + 1, 30 if entry is None else entry)
        assert http.get(f"{name}?offset={ZEROS[0]}").code == "offset_gone"
    for name, offset in (("i", "-1"), ("j", ZEROS[0])):
        assert http.put(name, stream_forked_from="a", stream_fork_offset=offset).status == 201
        assert http.head(name)["stream-earliest-offset"] == ZEROS[0]
        append(http, name, 1, 2)
        assert http.get(f"{name}?offset={ZEROS[0]}").body == texts(1, 2)
    # Parts of an entry that is gone cannot be had.
    answer = http.put("k", stream_forked_from="a", stream_fork_offset="-1", stream_fork_sub_offset="2")
    assert answer.code == "offset_gone"
    assert http.get("k").status == 404


# -- what is deleted -----------------------------------------------------------------------------------


def only_manifest(data_dir: Path, name: str) -> bool:
    return [path.name for path in folder(data_dir, name).rglob("*") if path.is_file()] == ["manifest.json"]


def test_objects_of_deleted_and_expired_streams_go(server: ServerProcess, http: Wire) -> None:
    assert http.put("deleted", TEXT).status == 201
    assert http.put("expired", TEXT, stream_ttl="3").status == 201
    for name in ("deleted", "expired"):
        append(http, name, 1, 7)
    wait_until(lambda: len(stored(server.data_dir, "deleted")) == 7, "sealed")
    assert http.delete("deleted").status == 204
    for name in ("deleted", "expired"):
        wait_until(lambda name=name: only_manifest(server.data_dir, name), f"objects of {name} gone")
        assert http.get(name).status == 404
    # Used again, the name has a folder of its own.
    assert http.put("deleted", TEXT).status == 201
    append(http, "deleted", 1, 4)
    wait_until(lambda: len(stored(server.data_dir, "deleted", 1)) == 4, "sealed again")
    assert only_manifest(server.data_dir, "deleted")
    check_verified(server)


def test_objects_of_a_soft_deleted_source_stay_until_its_last_fork_goes(
    server: ServerProcess, http: Wire
) -> None:
    assert http.put("a", TEXT).status == 201
    append(http, "a", 1, 7)
    assert fork(http, "f", "a", 4) == 201
    assert fork(http, "g", "a", 2) == 201
    wait_until(lambda: only_manifest(server.data_dir, "f"), "the fork has a manifest")
    assert http.delete("a").status == 204
    assert http.delete("f").status == 204
    wait_idle(server.data_dir)
    assert stored(server.data_dir, "a") == set(range(1, 8))
    assert http.get("g").body == texts(1, 2)
    assert http.delete("g").status == 204
    wait_until(lambda: only_manifest(server.data_dir, "a"), "the source is gone")


def test_the_registry_can_have_bounds(start_server: StartServer) -> None:
    server = start_server(env={**SEALING_ENV, "TAILRACE_REGISTRY_RETENTION_BYTES": "600"})
    http = Wire(server.port)
    assert http.head("__registry__")["stream-retention-bytes"] == "600"
    for number in range(20):
        assert http.put(f"s/{number}", TEXT).status == 201
    wait_until(lambda: earliest(http, "__registry__") > 10, "the registry trimmed")
    answer = http.get("__registry__")
    events = answer.json
    assert events[-1]["key"] == "s/19"
    assert len(events) == 20 - parse_offset(answer["stream-earliest-offset"])[1]
    http.close()
    server.restart()
    assert earliest(http, "__registry__") > 10
    http.close()
