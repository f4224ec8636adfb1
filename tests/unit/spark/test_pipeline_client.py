"""The pipeline's calls: repeated until there is an answer, refusals as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from tailrace.spark.jobs.pipeline import PAUSE_S_DONE, RetryTracker
from tailrace.spark.jobs.pipeline_client import PipelineClient, RequestRefusedError, ServerUnreachableError
from tailrace.storage.segments.index_files import PublishRequest

PUBLICATION = PublishRequest(stream_id="ab", job="companions", plan_hash="h", writer="w", inputs=[])


class _Script(ThreadingHTTPServer):
    """Answers what it was told to, one after the other; 0 closes the connection without an answer."""

    answers: list[tuple[int, bytes]]
    bodies: list[bytes]
    tokens: list[str | None]


class _Handler(BaseHTTPRequestHandler):
    server: _Script  # type: ignore[assignment]

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.tokens.append(self.headers["Authorization"])
        status, body = self.server.answers.pop(0)
        if status:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""


@pytest.fixture
def script() -> Iterator[_Script]:
    server = _Script(("127.0.0.1", 0), _Handler)
    server.answers, server.bodies, server.tokens = [], [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def _owner(script: _Script, tokens: Iterator[str] | None = None) -> PipelineClient:
    port = script.server_address[1]
    found = tokens or iter("abcdef")
    return PipelineClient(f"http://127.0.0.1:{port}", lambda: next(found), sleep=lambda _s: None)


def test_p4_the_same_bytes_until_there_is_an_answer(script: _Script) -> None:
    done = msgspec.json.encode({"result": "published", "manifest_generation": 2})
    script.answers = [(503, b""), (0, b""), (429, b"{}"), (200, done)]
    assert _owner(script).publish(PUBLICATION) == "published"
    assert len(script.bodies) == 4
    assert len(set(script.bodies)) == 1
    assert script.tokens == ["Bearer a", "Bearer b", "Bearer c", "Bearer d"]


def test_refusals(script: _Script) -> None:
    refused = msgspec.json.encode({"error": {"code": "plan_superseded", "message": "another plan"}})
    script.answers = [(409, refused), (500, b"oops")]
    with pytest.raises(RequestRefusedError, match="another plan") as caught:
        _owner(script).publish(PUBLICATION)
    assert (caught.value.status, caught.value.code) == (409, "plan_superseded")
    with pytest.raises(RequestRefusedError) as caught:
        _owner(script).publish(PUBLICATION)
    assert caught.value.status == 500


def test_nobody_there(script: _Script) -> None:
    script.answers = [(503, b"")]
    port = script.server_address[1]
    with pytest.raises(ServerUnreachableError):
        PipelineClient(f"http://127.0.0.1:{port}", give_up_s=0.0, sleep=lambda _s: None).publish(PUBLICATION)


def test_work_that_comes_back_waits() -> None:
    now = 0.0
    tries = RetryTracker(lambda: now)
    assert tries.is_due("a", "h")
    pauses: list[float] = []
    for _ in range(8):
        tries.record_attempt("a", "h")
        began = now
        while not tries.is_due("a", "h"):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [0.5, 2, 8, 32, 128, 300, 300, 300]
    assert tries.is_due("b", "h")
    assert tries.attempts_max == 8


def test_what_was_published_just_now_is_not_built_again() -> None:
    """However long it took: the server lists it until it has looked again."""
    now = 0.0
    tries = RetryTracker(lambda: now)
    tries.record_attempt("a", "h")
    now = 60.0
    tries.record_success("a", "h")
    assert not tries.is_due("a", "h")
    assert tries.is_due("a", "another plan")
    now += PAUSE_S_DONE
    assert tries.is_due("a", "h"), "it is still wanted"
    assert tries.attempts_max == 1
