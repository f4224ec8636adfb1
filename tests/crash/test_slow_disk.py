"""A disk that takes its time: readers do not wait for it, and nobody is told what is not durable yet."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.faults import JOURNAL, SYNC, WRITE, Disk
from crash.station import Station, eventually
from crash.wire import Answer
from support.calls import Caller
from support.server import ServerProcess
from support.watch_client import Live
from support.wire import is_readable

# The file that appends go to; the next one is being prepared meanwhile, and must not take the blow.
ACTIVE = "0000000000000001.jnl"
LONG_US = 20_000_000
PAUSE_US = 2_500_000
END_OF_BODY = b"0\r\n\r\n"


def slow_down(post: Station) -> None:
    """Syncs take 5 ms from now on, which the server notices: it stops doing them on its main thread."""
    post.disk.delay(JOURNAL, SYNC, 5000)
    post.append_many(3)


@pytest.fixture
def post(tmp_path: Path, disk: Disk) -> Iterator[Station]:
    flags = ("--journal-file-bytes", "64KiB", "--append-ms", "20000", "--request-ms", "25000")
    station = Station(tmp_path, disk, *flags).start()
    slow_down(station)
    yield station
    station.kill()
    print(station.server.log)


@pytest.mark.parametrize("operation", [WRITE, SYNC], ids=["write", "sync"])
def test_nothing_is_shown_before_it_is_durable(post: Station, disk: Disk, operation: int) -> None:
    # Every one of them: two are under way side by side, and either may be the first to get here.
    pause = disk.delay(ACTIVE, operation, LONG_US)
    waiting = post.in_background("POST", "lines", post.line())
    created = post.in_background("PUT", "new", b"content")
    eventually(lambda: disk.hits(pause) > 0, "the disk is busy")
    post.check()
    assert post.send("GET", "new").status == 404
    assert not waiting.answered
    assert not created.answered


def test_who_waits_too_long_is_told_that_the_outcome_is_unknown(tmp_path: Path, disk: Disk) -> None:
    post = Station(tmp_path, disk, "--append-ms", "1500").start()
    slow_down(post)
    body = post.line()
    pause = disk.delay(ACTIVE, SYNC, 2 * PAUSE_US, count=1)
    answer = post.in_background("POST", "lines", body).wait()
    assert answer is not None
    assert (answer.status, answer.code) == (408, "append_timeout")
    assert disk.hits(pause) == 1
    eventually(lambda: post.send("HEAD", "lines").entry == 4, "the append succeeded after all")
    post.acknowledged.append(body)
    post.append_many(1)
    post.crash_and_check()
    post.kill()


def test_a_repeated_delete_waits_for_the_first(post: Station, disk: Disk) -> None:
    pause = disk.delay(ACTIVE, WRITE, LONG_US, count=1)
    first = post.in_background("DELETE", "lines")
    eventually(lambda: disk.hits(pause) == 1, "the disk is busy")
    second = post.in_background("DELETE", "lines")
    eventually(lambda: post.metric("tailrace_connections ") >= 3, "the second has come")
    assert post.server.status("/healthz") == 200
    assert not first.answered
    assert not second.answered
    post.crash_and_check()


def test_a_repeated_delete_is_answered_with_the_first(post: Station, disk: Disk) -> None:
    pause = disk.delay(ACTIVE, SYNC, PAUSE_US // 10, count=1)
    first = post.in_background("DELETE", "lines")
    eventually(lambda: disk.hits(pause) == 1, "the disk is busy")
    for request in (first, post.in_background("DELETE", "lines"), post.in_background("DELETE", "lines")):
        answer = request.wait()
        assert answer is not None
        assert answer.status == 204
    assert post.send("GET", "lines").status == 404


class Request:
    """A request whose bytes have been sent when this returns; its answer is read later."""

    def __init__(self, post: Station, method: str, body: bytes = b"", *headers: str, query: str = "") -> None:
        self._method = method
        self._socket = socket.create_connection(("127.0.0.1", post.server.port), timeout=30)
        fields = ("Host: a", "Content-Type: text/plain", f"Content-Length: {len(body)}", *headers)
        head = "\r\n".join((f"{method} /v1/stream/lines{query} HTTP/1.1", *fields, "", ""))
        self._socket.sendall(head.encode() + body)
        # The server reads what has arrived in one turn, so it has this request when it answers the next.
        assert post.server.status("/healthz") == 200

    @property
    def answered(self) -> bool:
        return is_readable(self._socket)

    def read_until(self, text: bytes) -> bytes:
        """What has arrived when this is in it, or when the connection has ended."""
        found = b""
        while text not in found and (data := self._socket.recv(65536)):
            found += data
        return found

    def answer(self) -> Answer:
        with http.client.HTTPResponse(self._socket, method=self._method) as response:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def producer(seq: int) -> tuple[str, ...]:
    return ("Producer-Id: p", "Producer-Epoch: 0", f"Producer-Seq: {seq}")


def test_a_duplicate_names_no_sequence_that_is_not_durable(post: Station, disk: Disk) -> None:
    """The batch that the duplicate waits for is durable before the one with the next sequence."""
    with Request(post, "POST", b"zero\n", *producer(0)) as first:
        assert first.answer().status == 200
    disk.delay(
        ACTIVE, SYNC, LONG_US, skip=1
    )  # first of the two: rules are consulted in order, and this passes
    pause = disk.delay(ACTIVE, SYNC, PAUSE_US // 2, count=1)
    with Request(post, "POST", post.line()) as before:
        eventually(lambda: disk.hits(pause) == 1, "the disk is busy")
        with (
            Request(post, "POST", b"zero\n", *producer(0)) as duplicate,
            Request(post, "POST", b"one\n", *producer(1)) as following,
        ):
            assert before.answer().status == 204
            answer = duplicate.answer()
            assert (answer.status, answer.headers["producer-seq"]) == (204, "0")
            assert not following.answered


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_deletion_shows_when_it_is_durable(post: Station, disk: Disk, method: str) -> None:
    """A crash may still take it back: then the stream was never gone."""
    pause = disk.delay(ACTIVE, SYNC, PAUSE_US // 2, count=1)
    with Request(post, "DELETE") as deletion:
        eventually(lambda: disk.hits(pause) == 1, "the disk is busy")
        with Request(post, method, b"x\n" if method == "POST" else b"") as request:
            assert not request.answered
            assert deletion.answer().status == 204
            assert request.answer().status == 404
    assert post.send("GET", "lines").status == 404


def test_a_live_reader_stays_until_the_deletion_is_durable(post: Station, disk: Disk) -> None:
    """It is woken by an append in between, when the deletion is decided already."""
    with Request(post, "GET", query="?live=sse&offset=now") as reader:
        assert b"upToDate" in reader.read_until(b"upToDate")
        disk.delay(ACTIVE, SYNC, PAUSE_US, skip=1, count=1)
        pause = disk.delay(ACTIVE, SYNC, PAUSE_US // 2, count=1)
        with Request(post, "POST", b"the last line\n") as append:
            eventually(lambda: disk.hits(pause) == 1, "the disk is busy")
            with Request(post, "DELETE") as deletion:
                assert append.answer().status == 204
                assert post.server.status("/healthz") == 200, "the reader was woken before that"
                assert not reader.answered
                assert not deletion.answered
                assert reader.read_until(END_OF_BODY).endswith(END_OF_BODY)
                assert deletion.answer().status == 204


def test_a_deletion_that_fails_is_never_shown(post: Station, disk: Disk) -> None:
    """Requests that came meanwhile are decided by what is durable."""
    pause = disk.delay(ACTIVE, SYNC, PAUSE_US // 2, count=1)
    disk.fail(ACTIVE, SYNC, count=1)
    with Request(post, "DELETE") as deletion:
        eventually(lambda: disk.hits(pause) == 1, "the disk is busy")
        with Request(post, "GET") as read, Request(post, "POST", b"x\n") as append:
            assert deletion.answer().status == 503
            answer = read.answer()
            assert (answer.status, answer.body) == (200, b"".join(post.acknowledged))
            assert append.answer().status == 503
    post.check()


def test_reads_go_on_while_the_next_journal_file_is_awaited(post: Station, disk: Disk) -> None:
    pause = disk.delay("0000000000000003.jnl", SYNC, LONG_US, count=1)
    post.append_many(5, size=14_000)
    eventually(lambda: disk.hits(pause) == 1, "the third file is being prepared")
    waiting = post.in_background("POST", "lines", post.line(60_000))
    eventually(lambda: post.metric("tailrace_append_queue_bytes") > 60_000, "an append waits for the file")
    post.check()
    assert not waiting.answered


def test_the_first_sync_that_hangs_on_a_fast_disk_stops_nobody_else(tmp_path: Path, disk: Disk) -> None:
    post = Station(tmp_path, disk, "--append-ms", "20000").start()
    post.append_many(20)
    pause = disk.delay(ACTIVE, SYNC, LONG_US, count=1)
    waiting = post.in_background("POST", "lines", post.line())
    eventually(lambda: disk.hits(pause) == 1, "the disk is busy")
    post.check()
    assert not waiting.answered
    post.kill()


def test_a_server_that_is_ready_signs_for_its_first_client(tmp_path: Path, disk: Disk) -> None:
    """The keys of tokens and checkpoints are written at the first start, however long the disk takes."""
    disk.delay(JOURNAL, SYNC, 300_000)
    server = ServerProcess(tmp_path / "data", env=disk.env).start()
    try:
        live = Live(server)
        live.send("subscribe", "s", query={"collection": "c"})
        assert live.take()["type"] == "subscribe_ack"
        live.close()
        pull = "/replication/v1/databases/default/pull?collection=c"
        assert Caller(server)("GET", pull).status == 200
    finally:
        server.stop()
