"""Sections 11 and 12: server-sent events and WebSockets."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from conftest import StartServer
from support.calls import eventually
from support.wire import Wire, fresh, request_bytes
from tailrace.protocol.offsets import encode_offset

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"


def filled(http: Wire, *bodies: str, content_type: str = TEXT, **more: str) -> str:
    name = fresh()
    assert http.put(name, content_type, **more).status == 201
    for body in bodies:
        assert http.post(name, content_type, body).status == 204
    return name


def metric(http: Wire, pattern: str) -> float:
    found = re.search(rf"^{pattern} (\S+)$", http.get("/metrics").body.decode(), re.MULTILINE)
    assert found is not None, pattern
    return float(found[1])


# -- 11 SSE


def test_the_head_of_an_event_stream(http: Wire) -> None:
    for content_type, encoding in [
        (JSON, None),
        (TEXT, None),
        ("text/csv; charset=utf-8", None),
        (BYTES, "base64"),
        ("application/x-ndjson", "base64"),
        ("image/png", "base64"),
    ]:
        with http.events(f"{filled(http, content_type=content_type)}?offset=-1&live=sse") as events:
            assert events.head.status == 200
            assert events.head["content-type"] == "text/event-stream"
            assert events.head["cache-control"] == "no-cache"
            assert events.head["x-accel-buffering"] == "no"
            assert "content-length" not in events.head
            assert events.head.get("stream-sse-data-encoding") == encoding
            assert events.control()["upToDate"] is True


def test_the_framing_is_exact(http: Wire) -> None:
    name = filled(http, '[{"n":1},{"n":2}]', content_type=JSON)
    with http.events(f"{name}?offset=-1&live=sse") as events:
        raw = events.connection.read_chunk()
    offset = encode_offset(0, 2).encode()
    data = rb'event: data\ndata:\[{"n":1},{"n":2}\]\nid: %b\n\n' % offset
    control = rb'event: control\ndata:{"streamNextOffset":"%b".*"upToDate":true.*}\nid: %b\n\n'
    assert re.fullmatch(data + control % (offset, offset), raw)


def test_catching_up_then_following(http: Wire) -> None:
    name = filled(http, "[1]", "[2]", content_type=JSON)
    with http.events(f"{name}?offset=-1&live=sse") as events:
        assert events.data() == b"[1,2]"
        control = events.control()
        assert control.pop("streamCursor").isdigit()
        assert control == {"streamNextOffset": encode_offset(0, 2), "upToDate": True}
        for number in range(3, 6):
            http.post(name, JSON, f"[{number}]")
            assert events.data() == f"[{number}]".encode()
            assert events.control()["streamNextOffset"] == encode_offset(0, number)


def test_starting_at_the_tail(http: Wire) -> None:
    name = filled(http, "x")
    for offset in ("now", encode_offset(0, 1)):
        with http.events(f"{name}?offset={offset}&live=sse") as events:
            assert events.control()["streamNextOffset"] == encode_offset(0, 1)
            http.post(name, TEXT, "y")
            assert events.data() == b"y"
            events.control()
        http.delete(name)
        http.put(name, TEXT, "x")
        name = filled(http, "x")


@pytest.mark.parametrize("content_type", [JSON, TEXT, BYTES])
@pytest.mark.parametrize("offset", ["-1", "now"])
def test_a_reader_that_reconnects_continues_behind_its_last_event(
    http: Wire, content_type: str, offset: str
) -> None:
    """As an `EventSource` does it: with the first URL, and the id of the last event that it was given."""
    name = filled(http, "1", "2", content_type=content_type)
    url = f"{name}?offset={offset}&live=sse"
    with http.events(url) as events:
        if offset == "-1":
            events.data()
            assert events.last_id == encode_offset(0, 2), "also if the control is lost"
        assert events.control()["streamNextOffset"] == events.last_id == encode_offset(0, 2)
        last_id = events.last_id
    http.post(name, content_type, "3")
    for _ in range(2):
        with http.events(url, {"Last-Event-ID": last_id}) as events:
            assert events.head["stream-start"] == "last-event-id"
            data = events.data()
            assert data == {JSON: b"[3]", TEXT: b"3", BYTES: base64.b64encode(b"3")}[content_type]
            assert events.last_id == encode_offset(0, 3)
    with http.events(url, {"Last-Event-ID": encode_offset(0, 3)}) as events:
        events.control()
        assert events.last_id == encode_offset(0, 3), "and at the tail it waits there"


def test_the_last_event_id_is_an_offset_like_others(http: Wire) -> None:
    name = filled(http, "x", "y")
    resumed = {"Last-Event-ID": encode_offset(0, 1)}
    with http.events(f"{name}?live=sse", resumed) as events:
        assert events.data() == b"y", "the URL needs no offset then"
    with http.events(f"{name}?live=sse&since=2020-01-01T00:00:00Z", resumed) as events:
        assert events.data() == b"y", "and a time in it does not count"
    with http.events(f"{name}?live=sse&offset=-1", {"Last-Event-ID": ""}) as events:
        assert events.data() == b"xy"
        assert "stream-start" not in events.head
    for foreign in ("now", "-1", "7", "x" * 26):
        with http.events(f"{name}?live=sse&offset=-1", {"Last-Event-ID": foreign}) as events:
            assert events.head["stream-start"] == "offset", "a foreign id is ignored, and the answer says so"
            assert events.data() == b"xy"
    beyond = http.get(f"{name}?live=sse&offset=-1", {"Last-Event-ID": encode_offset(0, 9)})
    assert (beyond.status, beyond.code) == (400, "offset_beyond_tail")
    assert http.get(f"{name}?offset=-1", resumed).body == b"xy", "other modes have no events"
    assert http.get(f"{name}?offset=-1&live=long-poll", resumed).body == b"xy"


def test_the_id_of_a_reader_with_a_key_passes_what_is_not_its_own(start_server: StartServer) -> None:
    http = Wire(start_server("--sse-keep-alive-ms", "100").port)
    name = filled(http)
    for number, key in enumerate("abba"):
        http.post(name, TEXT, str(number), stream_key=key)
    with http.events(f"{name}?offset=-1&live=sse&key=a") as events:
        assert (events.data(), events.last_id) == (b"03", encode_offset(0, 4))
        events.control()
        http.post(name, TEXT, "4", stream_key="b")
        events.control()
        assert events.last_id == encode_offset(0, 5), "told with the next keep-alive"
    http.post(name, TEXT, "5", stream_key="a")
    with http.events(f"{name}?offset=-1&live=sse&key=a", {"Last-Event-ID": encode_offset(0, 5)}) as events:
        assert events.data() == b"5"
    http.close()


def test_pages_of_the_past_come_one_by_one_each_with_its_control(start_server: StartServer) -> None:
    http = Wire(start_server("--read-page-bytes", "4").port)
    name = filled(http, "aaa", "bbb", "ccc")
    with http.events(f"{name}?offset=-1&live=sse") as events:
        for number, body in enumerate((b"aaa", b"bbb", b"ccc"), 1):
            assert events.data() == body
            control = events.control()
            assert control["streamNextOffset"] == encode_offset(0, number)
            assert control.get("upToDate", False) is (number == 3)
    http.close()


def test_the_end_of_a_closed_stream(http: Wire) -> None:
    final = {"streamNextOffset": encode_offset(0, 1), "upToDate": True, "streamClosed": True}
    name = filled(http, "x")
    with http.events(f"{name}?offset=now&live=sse") as waiting:
        waiting.control()
        http.post(name, stream_closed="true")
        assert waiting.control() == final
        assert waiting.next() is None
    with http.events(f"{name}?offset=-1&live=sse") as late:
        assert late.data() == b"x"
        assert late.control() == final
        assert late.next() is None
    with http.events(f"{name}?offset={encode_offset(0, 1)}&live=sse") as at_tail:
        assert at_tail.control() == final
        assert at_tail.next() is None
    name = filled(http)
    with http.events(f"{name}?offset=-1&live=sse") as events:
        events.control()
        http.post(name, TEXT, "last words", stream_closed="true")
        assert events.data() == b"last words"
        assert events.control() == final
        assert events.next() is None


def test_the_connection_goes_on_after_the_end(http: Wire) -> None:
    name = filled(http, "x")
    http.post(name, stream_closed="true")
    with http.connect() as connection:
        connection.send(request_bytes("GET", f"/v1/stream/{name}?offset=-1&live=sse") * 2)
        first, second = connection.read_answer(), connection.read_answer()
    assert first.body == second.body
    assert first.body.count(b"event: control") == 1


@pytest.mark.parametrize(
    "body",
    [
        "a\nb",
        "a\r\nb\rc\n",
        "\n",
        "\r",
        " leading",
        "a\n b",
        "data:x\n\nevent: control\ndata:{}\n\n",
        "\n\n\n",
        ": comment",
        "gr\u00fc\u00dfe \U0001f30a",
        "\x00\x01",
    ],
)
def test_text_cannot_forge_events(http: Wire, body: str) -> None:
    name = filled(http, body)
    with http.events(f"{name}?offset=-1&live=sse") as events:
        assert events.data().decode() == body.replace("\r\n", "\n").replace("\r", "\n")
        events.control()
    http.close()


def test_bytes_travel_as_base64_one_unit_per_event(http: Wire) -> None:
    name = filled(http, content_type=BYTES)
    blobs = [bytes(range(256)), b"\xff", b"\r\n\r\n"]
    for blob in blobs:
        http.post(name, BYTES, blob)
    with http.events(f"{name}?offset=-1&live=sse") as events:
        assert base64.b64decode(events.data(), validate=True) == b"".join(blobs)
        events.control()
        http.post(name, BYTES, b"\x00")
        assert events.data() == b"AA=="


def test_text_that_is_not_utf8_is_sent_as_it_is(http: Wire) -> None:
    name = filled(http)
    http.call("POST", name, {"Content-Type": TEXT}, b"\xff\xfe\n\x80")
    with http.events(f"{name}?offset=-1&live=sse") as events:
        assert events.data() == b"\xff\xfe\n\x80"


def test_errors_before_the_first_byte_are_plain_answers(http: Wire) -> None:
    name = filled(http, content_type=JSON)
    for query, status in [
        ("live=sse", 400),
        ("offset=zz&live=sse", 400),
        (f"offset={encode_offset(0, 9)}&live=sse", 400),
        ("offset=-1&live=sse&filter=a:b", 400),
    ]:
        with http.events(f"{name}?{query}") as events:
            assert events.head.status == status
    with http.events(f"{name}?offset=-1&live=sse&filter=a:b") as events:
        assert events.head.code == "invalid_filter"


def test_a_stream_that_disappears_ends_the_response(http: Wire) -> None:
    plain, source = filled(http), filled(http)
    http.put(f"{source}/fork", stream_forked_from=source)
    for name, status in ((plain, 404), (source, 410)):
        with http.events(f"{name}?offset=now&live=sse") as events:
            events.control()
            http.delete(name)
            assert events.next() is None
        assert http.get(f"{name}?offset=now&live=sse").status == status


def test_a_key_in_live_modes(start_server: StartServer) -> None:
    http = Wire(start_server("--sse-keep-alive-ms", "600000").port)
    name = filled(http)
    http.post(name, TEXT, "other", stream_key="b")
    with http.events(f"{name}?offset=-1&live=sse&key=a") as events:
        control = events.control()
        assert (control["streamNextOffset"], control["upToDate"]) == (encode_offset(0, 1), True), (
            "nothing matches: one control at once"
        )
        http.post(name, TEXT, "other", stream_key="b")
        http.post(name, TEXT, "mine", stream_key="a")
        assert events.data() == b"mine"
        assert events.control()["streamNextOffset"] == encode_offset(0, 3)
    with http.events(f"{name}/pk/a?offset=-1&live=sse") as events:
        assert events.data() == b"mine"
    http.close()


def test_since_and_cursor_in_live_modes(http: Wire) -> None:
    name = filled(http)
    http.post(name, TEXT, "old", stream_timestamp="2001-01-01T00:00:00Z")
    http.post(name, TEXT, "new", stream_timestamp="2002-01-01T00:00:00Z")
    with http.events(
        f"{name}?since=2001-06-01T00:00:00Z&live=sse&cursor=99999999999", {"Last-Event-ID": "7"}
    ) as events:
        assert events.data() == b"new"
        first = int(events.control()["streamCursor"])
        assert first > 99999999999
        http.post(name, TEXT, "x")
        assert events.data() == b"x"
        assert int(events.control()["streamCursor"]) > first


def test_a_type_that_binds_ends_the_connection(http: Wire) -> None:
    for bind in ("put", "append"):
        name = fresh()
        http.put(name)
        with (
            http.events(f"{name}?offset=-1&live=sse") as events,
            websocket(http, f"{name}?offset=-1&live=ws") as socket,
        ):
            assert events.head["stream-sse-data-encoding"] == "base64"
            events.control()
            assert receive(socket)["type"] == "control"
            if bind == "put":
                http.put(name, JSON)
            else:
                http.post(name, JSON, "[1]")
            assert events.next() is None
            assert close_code(socket) == 1001


def test_keep_alive_rotation_and_a_skipped_position(start_server: StartServer) -> None:
    http = Wire(start_server("--sse-keep-alive-ms", "1", "--sse-rotation-ms", "5000").port)
    name = filled(http, "x")
    http.post(name, TEXT, "y", stream_key="b")
    with (
        http.events(f"{name}?offset=-1&live=sse") as events,
        http.events(f"{name}?offset=now&live=sse&key=a") as keyed,
    ):
        events.data()
        events.control()
        keyed.control()
        http.post(name, TEXT, "z", stream_key="b")
        events.data()
        events.control()
        skipped = keyed.control()
        assert skipped["streamNextOffset"] == encode_offset(0, 3), "comes with the keep-alive"
        rotated = events.control()
        assert rotated["streamNextOffset"] == encode_offset(0, 3)
        assert events.next() is None
        assert events.comments
        assert set(events.comments) == {b": keep-alive"}
    assert http.get(name).body == b"xyz"
    http.close()


# -- slow readers


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("unsent", ["1000000", "2000"])
def test_a_slow_reader_is_not_buffered_without_limit_and_loses_nothing(
    start_server: StartServer, unsent: str
) -> None:
    server = start_server("--live-unsent-bytes", unsent, "--read-page-bytes", "100000")
    http = Wire(server.port)
    name = filled(http, content_type=JSON)
    body = json.dumps(["x" * 1000] * 100)
    with (
        http.events(f"{name}?offset=-1&live=sse") as events,
        http.events(f"{name}?offset=-1&live=sse") as quick,
    ):
        events.control()
        quick.control()
        before = resident_kib(server.pid)
        reader = threading.Thread(target=read_items, args=(quick, 40_000))
        reader.start()
        for _ in range(400):
            assert http.post(name, JSON, body).status == 204
        eventually(lambda: metric(http, "tailrace_live_demoted_total"), bool)
        # The entries themselves are in memory once; one reader's backlog must not be there again.
        assert resident_kib(server.pid) - before < 90_000
        reader.join()
        assert read_items(events, 40_000) == 40_000
        assert events.control()["upToDate"] is True
        http.post(name, JSON, '["end"]')
        assert events.data() == b'["end"]'
    http.close()


def read_items(events: Any, count: int) -> int:
    seen = 0
    position = ""
    while seen < count:
        kind, data = events.next()
        if kind == "data":
            seen += len(json.loads(data))
        else:
            offset = json.loads(data)["streamNextOffset"]
            assert offset > position
            position = offset
    return seen


# -- 12 WebSocket


@contextmanager
def websocket(http: Wire, path: str, **options: Any) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{http.port}/v1/stream/{path}", compression=None, **options) as socket:
        yield socket


def receive(socket: ClientConnection) -> dict[str, Any]:
    message = socket.recv(timeout=20)
    assert isinstance(message, str)
    return json.loads(message)


def close_code(socket: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=20)
    return None if closed.value.rcvd is None else closed.value.rcvd.code


@pytest.mark.parametrize("mode", ["ws", "ws-internal"])
def test_messages_of_a_json_stream(http: Wire, mode: str) -> None:
    name = filled(http, '[{"n":1}]', content_type=JSON)
    with websocket(http, f"{name}?offset=-1&live={mode}") as socket:
        assert receive(socket) == {"type": "data", "payload": '[{"n":1}]'}
        control = receive(socket)
        assert control.pop("streamCursor").isdigit()
        assert control == {
            "type": "control",
            "streamNextOffset": encode_offset(0, 1),
            "upToDate": True,
            "streamClosed": False,
        }
        socket.send("ignored")
        socket.send(b"\x00" * 1024)
        http.post(name, JSON, '["\\u00e9\\n"]')
        assert receive(socket) == {"type": "data", "payload": '["\\u00e9\\n"]'}
        assert receive(socket)["streamNextOffset"] == encode_offset(0, 2)
        http.post(name, JSON, "[3]", stream_closed="true")
        assert receive(socket)["payload"] == "[3]"
        final = {
            "type": "control",
            "streamNextOffset": encode_offset(0, 3),
            "upToDate": True,
            "streamClosed": True,
        }
        assert receive(socket) == final
        assert close_code(socket) == 1000
    with websocket(http, f"{name}?offset=now&live={mode}") as socket:
        assert receive(socket) == final
        assert close_code(socket) == 1000


def test_text_and_bytes_in_messages(http: Wire) -> None:
    text, raw = filled(http, "gr\u00fc\u00df\u00dfe\r\n"), filled(http, content_type=BYTES)
    http.post(raw, BYTES, b"\x01\x02\x03\x04")
    with websocket(http, f"{text}?offset=-1&live=ws") as socket:
        assert receive(socket) == {"type": "data", "payload": "gr\u00fc\u00df\u00dfe\r\n"}
        receive(socket)
        http.call("POST", text, {"Content-Type": TEXT}, b"\xff")
        assert receive(socket) == {"type": "data", "payload": "/w==", "encoding": "base64"}
    with websocket(http, f"{raw}?offset=-1&live=ws") as socket:
        assert receive(socket) == {"type": "data", "payload": "AQIDBA==", "encoding": "base64"}


def test_how_a_websocket_ends(http: Wire, start_server: StartServer) -> None:
    name = filled(http)
    with websocket(http, f"{name}?offset=now&live=ws") as socket:
        receive(socket)
        http.delete(name)
        assert close_code(socket) == 4404
    server = start_server()
    own = Wire(server.port)
    name = filled(own)
    with websocket(own, f"{name}?offset=now&live=ws") as socket:
        receive(socket)
        own.close()
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert close_code(socket) == 1001
        stopping.join()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("?offset=zz&live=ws", 400),
        ("?live=ws", 400),
        ("/none?offset=-1&live=ws", 404),
        (f"?offset={encode_offset(0, 5)}&live=ws", 400),
    ],
)
def test_errors_before_the_upgrade_are_plain_answers(http: Wire, path: str, status: int) -> None:
    name = filled(http)
    with pytest.raises(InvalidStatus) as refused, websocket(http, f"{name}{path}"):
        pass
    assert refused.value.response.status_code == status
    assert set(json.loads(refused.value.response.body or b"")) == {"error"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 426),
        ({"Upgrade": "websocket"}, 426),
        ({"Connection": "Upgrade"}, 426),
        ({"Connection": "Upgrade", "Upgrade": "h2c"}, 426),
        ({"Connection": "Upgrade", "Upgrade": "websocket"}, 426),
        (
            {
                "Connection": "Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "8",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            },
            426,
        ),
        ({"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}, 400),
        (
            {
                "Connection": "Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "short",
            },
            400,
        ),
    ],
)
def test_handshakes_that_are_none(http: Wire, headers: dict[str, str], status: int) -> None:
    name = filled(http)
    with http.connect() as connection:
        connection.send(request_bytes("GET", f"/v1/stream/{name}?offset=-1&live=ws", headers))
        answer = connection.read_answer()
    assert answer.status == status
    if status == 426:
        assert answer["upgrade"].lower() == "websocket"


def test_a_client_that_says_too_much_is_cut_off_and_does_no_harm(http: Wire) -> None:
    name = filled(http)
    with websocket(http, f"{name}?offset=-1&live=ws") as socket:
        receive(socket)
        socket.send("x" * 5000)
        http.post(name, TEXT, "still")
        assert receive(socket)["payload"] == "still"


def test_a_slow_websocket_loses_nothing(start_server: StartServer) -> None:
    http = Wire(start_server("--live-unsent-bytes", "2000", "--read-page-bytes", "100000").port)
    name = filled(http, content_type=JSON)
    with websocket(http, f"{name}?offset=-1&live=ws", max_queue=1, max_size=2**24) as socket:
        receive(socket)
        body = json.dumps([os.urandom(500).hex()] * 100)
        for _ in range(200):
            http.post(name, JSON, body)
        eventually(lambda: metric(http, "tailrace_live_demoted_total"), bool)
        seen = 0
        while seen < 20_000:
            message = receive(socket)
            if message["type"] == "data":
                seen += len(json.loads(message["payload"]))
        assert seen == 20_000
        assert receive(socket)["upToDate"] is True
    http.close()
