"""Reads across hot and cold: every mode gives what it gave before anything was sealed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from conftest import StartServer
from support.cli import tailrace
from support.sealing import SEALING_ENV, hot, unsealed_blocks, wait_sealed, wait_until
from support.server import ServerProcess
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"
SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS


@pytest.fixture
def cold(start_server: StartServer) -> Iterator[Callable[..., tuple[ServerProcess, Wire]]]:
    """Starts a server that seals at once, with settings on top; its connection is closed in the end."""
    wires: list[Wire] = []

    def start(**more: str) -> tuple[ServerProcess, Wire]:
        server = start_server(env={**SEALING_ENV, **more})
        wires.append(Wire(server.port))
        return server, wires[-1]

    yield start
    for wire in wires:
        wire.close()


StartCold = Callable[..., tuple[ServerProcess, Wire]]
LAZY = {"TAILRACE_SEAL_AGE_MS": "3600000", "TAILRACE_SEAL_ENTRIES": "100000"}


def fill(http: Wire, name: str, content_type: str, count: int) -> list[bytes]:
    """Entries with keys, one second apart by their own account."""
    assert http.put(name, content_type).status == 201
    payloads: list[bytes] = []
    for number in range(count):
        payload = json.dumps({"n": number}).encode() if content_type == JSON else b"%d;" % number
        sent = {"stream_key": f"k{number % 4}", "stream_timestamp": str(START_NS + number * SECOND_NS)}
        assert http.post(name, content_type, payload, **sent).status == 204
        payloads.append(payload)
    return payloads


def seal(server: ServerProcess, http: Wire) -> None:
    """Everything to the object store, and out of the hot store."""
    assert http.call("POST", "/v1/server/_seal").json == {"sealed": True}
    wait_sealed(server.data_dir)


def whole(payloads: list[bytes], content_type: str) -> bytes:
    return b"[" + b",".join(payloads) + b"]" if content_type == JSON else b"".join(payloads)


def check_catch_up(http: Wire, name: str, payloads: list[bytes], content_type: str) -> None:
    tail = encode_offset(0, len(payloads))
    for after in range(len(payloads) + 1):
        answer = http.get(f"{name}?offset={encode_offset(0, after)}")
        assert answer.body == whole(payloads[after:], content_type)
        assert answer["stream-next-offset"] == tail
    for number in range(4):
        wanted = [payload for index, payload in enumerate(payloads) if index % 4 == number]
        assert http.get(f"{name}?key=k{number}").body == whole(wanted, content_type)
        assert http.get(f"{name}/pk/k{number}").body == whole(wanted, content_type)
    assert http.get(f"{name}?key=none").body == whole([], content_type)
    for index in range(len(payloads)):
        for shift_ns in (-1, 0, 1):
            since = f"{name}?since={START_NS + index * SECOND_NS + shift_ns}"
            assert http.get(since).body == whole(payloads[index + (shift_ns > 0) :], content_type)


def live_messages(http: Wire, name: str, count: int) -> list[Any]:
    """What SSE and a WebSocket bring of a JSON stream; both bring the same."""
    found: list[Any] = []
    with http.events(f"{name}?offset=-1&live=sse") as events:
        while len(found) < count:
            event = events.next()
            assert event is not None
            found += json.loads(event[1]) if event[0] == "data" else []
    by_socket: list[Any] = []
    url = f"ws://127.0.0.1:{http.port}/v1/stream/{name}?offset=-1&live=ws"
    with connect(url) as socket:
        while len(by_socket) < count:
            message = json.loads(socket.recv(timeout=20))
            by_socket += json.loads(message["payload"]) if message.get("type") == "data" else []
    assert by_socket == found
    return found


def test_every_mode_of_reading(cold: StartCold) -> None:
    server, http = cold()
    kept = {content_type: f"reads/{index}" for index, content_type in enumerate((JSON, TEXT, BYTES))}
    payloads = {content_type: fill(http, name, content_type, 10) for content_type, name in kept.items()}
    for _ in range(2):
        seal(server, http)
        for content_type, name in kept.items():
            check_catch_up(http, name, payloads[content_type], content_type)
        answer = http.get(f"{kept[JSON]}?offset=-1&live=long-poll")
        assert answer.body == whole(payloads[JSON], JSON)
        assert live_messages(http, kept[JSON], len(payloads[JSON])) == [
            json.loads(payload) for payload in payloads[JSON]
        ]
        with http.events(f"{kept[BYTES]}?offset=-1&live=sse") as events:
            text = b""
            while len(text) < len(b"".join(payloads[BYTES])):
                event = events.next()
                assert event is not None
                text += base64.b64decode(event[1]) if event[0] == "data" else b""
            assert text == b"".join(payloads[BYTES])
        http.close()
        server.restart()


def test_a_page_takes_from_segments_the_hot_store_and_memory(cold: StartCold) -> None:
    server, http = cold(**LAZY)
    payloads = fill(http, "page", JSON, 4)
    seal(server, http)
    for number in range(4, 8):
        payloads.append(b'{"n": %d}' % number)
        headers = {"stream_key": f"k{number % 4}", "stream_timestamp": str(START_NS + number * SECOND_NS)}
        assert http.post("page", JSON, payloads[-1], **headers).status == 204
        if number == 5:
            # Closing another stream moves the journal on, and with it these two into the hot store.
            http.put("other", TEXT, stream_closed="true")
            wait_until(lambda: unsealed_blocks(server.data_dir), "entries in the hot store")
    check_catch_up(http, "page", payloads, JSON)
    http.close()
    server.restart(kill=True)
    check_catch_up(http, "page", payloads, JSON)


def test_forks_of_what_is_cold(cold: StartCold) -> None:
    server, http = cold()
    payloads = fill(http, "source", TEXT, 8)
    seal(server, http)
    for entry in range(9):
        path = {"stream_forked_from": "/v1/stream/source", "stream_fork_offset": encode_offset(0, entry)}
        assert http.put(f"fork/{entry}", None, None, **path).status == 201
        assert http.get(f"fork/{entry}").body == b"".join(payloads[:entry])
        assert http.post(f"fork/{entry}", TEXT, b"own").status == 204
    # The first byte of the next entry, which is on the object store.
    sub = {"stream_forked_from": "/v1/stream/source", "stream_fork_offset": encode_offset(0, 4)}
    assert http.put("cut", None, None, **sub, stream_fork_sub_offset="1").status == 201
    assert http.put("cut", None, None, **sub, stream_fork_sub_offset="1").status == 200
    assert http.put("cut2", None, None, **sub, stream_fork_sub_offset="9").code == "invalid_fork"
    assert http.get("cut").body == b"".join(payloads[:4]) + b"4"
    seal(server, http)
    assert http.delete("source").status == 204
    assert http.put("fork/of/fork", None, None, stream_forked_from="/v1/stream/fork/5").status == 201
    for _ in range(2):
        seal(server, http)
        for entry in range(9):
            assert http.get(f"fork/{entry}").body == b"".join(payloads[:entry]) + b"own"
            since = START_NS + 6 * SECOND_NS
            expected = b"".join(payloads[6:entry]) + b"own"
            assert http.get(f"fork/{entry}?since={since}").body == expected
        assert http.get("fork/of/fork").body == b"".join(payloads[:5]) + b"own"
        http.close()
        server.restart(kill=True)


def test_what_is_deleted_leaves_the_object_store(cold: StartCold) -> None:
    server, http = cold()
    fill(http, "gone", TEXT, 7)
    seal(server, http)
    folder = server.data_dir / "objects" / "streams"

    def segments() -> list[str]:
        found = [
            path for path in folder.rglob("*.parquet") if b"tailrace.name\x18\x04gone" in path.read_bytes()
        ]
        return [path.name for path in found]

    assert segments()
    assert http.delete("gone").status == 204
    wait_until(lambda: not segments(), "no segments of the deleted stream")
    assert http.get("gone").status == 404
    payloads = fill(http, "gone", TEXT, 4)
    seal(server, http)
    assert http.get("gone").body == b"".join(payloads)


def test_the_seal_command(cold: StartCold) -> None:
    server, http = cold(**LAZY)
    one, other = fill(http, "one", TEXT, 3), fill(http, "other", TEXT, 3)
    done = tailrace("seal", "one", "--url", server.base_url)
    assert (done.code, done.out) == (0, "one is sealed\n")
    assert hot(server.data_dir)["blocks"] >= 2  # the other, and the registry
    done = tailrace("seal", "--url", server.base_url, "--json")
    assert (done.code, done.rows) == (0, [{"sealed": True, "stream": None}])
    wait_sealed(server.data_dir)
    assert http.get("one").body == b"".join(one)
    assert http.get("other").body == b"".join(other)
    assert tailrace("seal", "nobody", "--url", server.base_url).code == 1
    server.stop()
    assert tailrace("seal", "--url", server.base_url).code == 4
