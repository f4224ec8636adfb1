"""Section 20 and what bounds stand for: a limit reached is a clear refusal, and the server goes on."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from conftest import StartServer
from crash.faults import SYNC, Disk, build
from support.calls import eventually
from support.wire import Answer, Connection, Events, Wire, fresh, request_bytes
from tailrace.protocol.offsets import encode_offset

JSON, TEXT = "application/json", "text/plain"


def metric(http: Wire, pattern: str) -> float:
    found = re.search(rf"^{pattern} (\S+)$", http.get("/metrics").body.decode(), re.MULTILINE)
    assert found is not None, pattern
    return float(found[1])


def test_too_many_connections_are_told_so(start_server: StartServer) -> None:
    http = Wire(start_server("--connections", "3", "--live-connections", "3").port)
    held = [http.connect() for _ in range(3)]
    for connection in held:
        connection.send(request_bytes("GET", "/healthz"))
        assert connection.read_answer().status == 200
    with http.connect() as refused:
        answer = refused.read_answer()
        assert (answer.status, answer.code) == (429, "overloaded")
        assert refused.at_end()
    held.pop().close()

    def served() -> Answer:
        with http.connect() as connection:
            connection.send(request_bytes("GET", "/healthz"))
            return connection.read_answer()

    eventually(served, lambda answer: answer.status == 200)
    for connection in held:
        connection.close()


def test_too_many_live_readers_are_told_so(start_server: StartServer) -> None:
    http = Wire(start_server("--live-connections", "2").port)
    name = fresh()
    http.put(name, TEXT, "x")
    first, second = (http.events(f"{name}?offset=now&live=sse") for _ in range(2))
    first.control()
    second.control()
    for mode in ("sse", "long-poll"):
        answer = http.get(f"{name}?offset=now&live={mode}")
        assert (answer.status, answer.code) == (429, "overloaded")
    assert http.get(f"{name}?offset=-1&live=long-poll").body == b"x", "what need not wait is answered"
    assert http.get(f"{name}?offset=now&live=long-poll&timeout_ms=0").status == 204
    second.connection.close()
    eventually(
        lambda: http.get(f"{name}?offset=now&live=long-poll&timeout_ms=1").status,
        lambda status: status == 204,
    )
    assert metric(http, r'tailrace_live_connections\{mode="sse"\}') == 1
    first.connection.close()
    eventually(lambda: metric(http, r'tailrace_live_connections\{mode="sse"\}'), lambda count: count == 0)
    http.close()


# The file that appends go to; the next one is being prepared meanwhile, and must not take the blow.
ACTIVE = "0000000000000001.jnl"
STALLED = "append timed out; append outcome is unknown, check Stream-Next-Offset before retrying"


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(build(tmp_path), tmp_path / "faults")


def test_a_disk_that_stalls(start_server: StartServer, disk: Disk) -> None:
    """Appends are answered 408 and may still happen, queues fill up to 429, and reads go on."""
    server = start_server(
        "--append-ms",
        "1000",
        "--append-body-bytes",
        "1000",
        "--append-queue-stream-bytes",
        "2000",
        env=disk.env,
    )
    http = Wire(server.port)
    name, other = fresh(), fresh()
    http.put(name, TEXT)
    http.put(other, TEXT, "x")
    producer = {"producer_id": "p", "producer_epoch": "0"}
    disk.delay(ACTIVE, SYNC, 50_000, count=3)
    for _ in range(3):
        http.post(other, TEXT, "x")  # the server learns that this disk is slow
    rule = disk.delay(ACTIVE, SYNC, 5_000_000, count=1)
    waiting = [_sent(http, _append(name, b"a" * 900))]
    eventually(lambda: disk.hits(rule), bool)
    waiting.append(_sent(http, _append(name, b"b" * 900)))
    eventually(lambda: metric(http, "tailrace_append_queue_bytes"), lambda queued: queued > 1800)
    refused = http.post(name, TEXT, "c" * 900, producer_seq="0", **producer)
    assert (refused.status, refused.code) == (429, "overloaded")
    assert http.get(other).body == b"xxxx", "reading does not wait for the disk"
    assert http.get(f"{other}?offset=now&live=long-poll&timeout_ms=1200").status == 204, (
        "an idle poll is never 408"
    )
    stalled = [connection.read_answer() for connection in waiting]
    for answer in stalled:
        assert (answer.status, answer.code) == (408, "append_timeout")
        assert answer.json["error"]["message"] == STALLED
    created = http.put(fresh(), TEXT)
    assert created.status in (201, 408)
    eventually(lambda: http.head(name)["stream-next-offset"], lambda offset: offset == encode_offset(0, 2))
    assert http.post(name, TEXT, "c", producer_seq="0", **producer).status == 200, (
        "the refused one did not count"
    )
    assert http.get(name).body == b"a" * 900 + b"b" * 900 + b"c"
    for connection in waiting:
        connection.close()
    http.close()


def _append(name: str, body: bytes) -> bytes:
    return request_bytes("POST", f"/v1/stream/{name}", {"Content-Type": TEXT}, body)


def test_below_the_disk_reserve_writes_are_refused_and_the_rest_goes_on(start_server: StartServer) -> None:
    server = start_server()
    http = Wire(server.port)
    kept, other = fresh(), fresh()
    http.put(kept, TEXT, "x")
    http.put(other, TEXT)
    http.close()
    server.stop()
    server.args = ("--disk-reserve-bytes", str(2**60))
    server.start(ready=False)
    eventually(lambda: server.status("/readyz"), lambda status: status is not None)
    for answer in (
        http.post(kept, TEXT, "y"),
        http.put(fresh(), TEXT),
        http.post(kept, stream_closed="true"),
    ):
        assert (answer.status, answer.code) == (507, "insufficient_storage")
        assert answer["retry-after"] == "5"
    assert http.get(kept).body == b"x"
    assert http.delete(other).status == 204
    assert http.get("/healthz").status == 200
    assert server.status("/readyz") == 503
    http.close()


def test_limits_follow_settings(start_server: StartServer) -> None:
    http = Wire(
        start_server(
            "--append-body-bytes",
            "10",
            "--name-bytes",
            "8",
            "--key-bytes",
            "2",
            "--stream-seq-bytes",
            "2",
            "--producer-id-bytes",
            "2",
            "--list-page-max",
            "2",
            "--list-page",
            "1",
            "--json-depth",
            "2",
        ).port
    )
    assert http.put("n" * 9).code == "invalid_name"
    assert http.put("n" * 8, JSON).status == 201
    too_large = http.post("n" * 8, JSON, "[" + "1" * 10 + "]")
    assert (too_large.status, too_large.json["error"]["limit_bytes"]) == (413, 10)
    assert http.post("n" * 8, JSON, "[[[1]]]").code == "invalid_json"
    assert http.post("n" * 8, JSON, "[[1]]").status == 204
    assert http.post("n" * 8, JSON, "[1]", stream_key="abc").code == "invalid_header"
    assert http.post("n" * 8, JSON, "[1]", stream_seq="abc").code == "invalid_header"
    assert (
        http.post("n" * 8, JSON, "[1]", producer_id="abc", producer_epoch="0", producer_seq="0").code
        == "invalid_header"
    )
    http.put("second", TEXT)
    assert len(http.get("/v1/streams").json) == 1
    assert http.get("/v1/streams?limit=3").status == 400
    http.close()


def test_clients_that_take_too_long_are_sent_away(start_server: StartServer) -> None:
    http = Wire(start_server("--header-ms", "1000", "--body-idle-ms", "1000", "--idle-ms", "1000").port)
    http.put("s", TEXT)
    for data in (
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: ",
        b"POST /v1/stream/s HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nab",
    ):
        with http.connect() as connection:
            connection.send(data)
            answer = connection.read_answer()
            assert (answer.status, answer.code) == (408, "request_timeout")
            assert connection.at_end()
    with http.connect() as idle:
        assert idle.at_end(), "a silent connection is closed"
    http.close()


def test_stopping_with_readers_of_every_kind(start_server: StartServer) -> None:
    server = start_server("--drain-ms", "8000")
    http = Wire(server.port)
    name = fresh()
    http.put(name, JSON, "[1]")
    events = Events(_sent(http, request_bytes("GET", f"/v1/stream/{name}?offset=now&live=sse")))
    events.control()
    poll = _sent(http, request_bytes("GET", f"/v1/stream/{name}?offset=now&live=long-poll"))
    eventually(lambda: metric(http, r'tailrace_live_connections\{mode="long-poll"\}'), bool)
    idle = http.connect()
    http.close()
    with connect(f"ws://127.0.0.1:{server.port}/v1/stream/{name}?offset=now&live=ws") as socket:
        assert json.loads(socket.recv(timeout=20))["upToDate"]
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert events.next() is None, "the response ends, the client reconnects"
        answer = poll.read_answer()
        assert (answer.status, answer["stream-up-to-date"]) == (204, "true")
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        assert idle.at_end()
        stopping.join()
    for connection in (events.connection, poll, idle):
        connection.close()
    assert not server.running


def _sent(http: Wire, data: bytes) -> Connection:
    connection = http.connect()
    connection.send(data)
    return connection


def test_what_was_acknowledged_before_a_stop_is_there_after_it(start_server: StartServer) -> None:
    server = start_server()
    name = fresh()
    observer = Wire(server.port)
    observer.put(name, JSON)

    def write(writer: int) -> list[int]:
        acknowledged: list[int] = []
        wire = Wire(server.port)
        for number in range(writer * 10_000, writer * 10_000 + 10_000):
            try:
                if wire.post(name, JSON, f"[{number}]").status != 204:
                    break
            except (OSError, AssertionError):
                break
            acknowledged.append(number)
        wire.close()
        return acknowledged

    with ThreadPoolExecutor(4) as writers:
        results = [writers.submit(write, writer) for writer in range(4)]
        # Until each of them has been heard, also the last to get a turn.
        eventually(
            lambda: {number // 10_000 for number in observer.get(name).json}, lambda seen: len(seen) == 4
        )
        observer.close()
        server.stop()
    acknowledged = [result.result() for result in results]
    server.start()
    http = observer
    found: list[int] = []
    offset = "-1"
    while "up-to-date" not in offset:
        page = http.get(f"{name}?offset={offset}")
        found += page.json
        offset = "up-to-date" if "stream-up-to-date" in page else page["stream-next-offset"]
    http.close()
    for numbers in acknowledged:
        assert numbers
        mine = [number for number in found if number // 10_000 == numbers[0] // 10_000]
        assert mine[: len(numbers)] == numbers
        assert len(mine) <= len(numbers) + 1, "at most the one whose answer was not heard"
