"""Bodies that come after their heads: nobody waits for those of clients that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server import ServerProcess
from support.wire import Wire, fresh, request_bytes
from tailrace.auth import create_token

SECRET = "a secret that is long enough for HS256, 32 bytes"
MIB = 1024 * 1024
PLAIN = {"Content-Type": "text/plain"}
WRITER = {"Authorization": f"Bearer {create_token(SECRET, sub='w', scopes=['read', 'write'])}", **PLAIN}
PIECE = b"x" * 128 * 1024


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_APPEND_QUEUE_MAX_BYTES": "32MiB",
        "TAILRACE_APPEND_QUEUE_STREAM_BYTES": "32MiB",
    }
    directory = tmp_path_factory.mktemp("late")
    server = ServerProcess(directory / "data", args=("--workers", str(request.param)), env=env).start()
    found = Wire(server.port)
    yield found
    found.close()
    server.stop()


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer trk_0123456789abcdef_no"}])
@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("path", ["/v1/stream/orders", "/hub/messages", "/v1/server/_keys"])
def test_without_a_good_token_the_body_is_not_waited_for(
    wire: Wire, path: str, method: str, given: dict[str, str]
) -> None:
    framings = ({"Content-Length": str(10 * MIB)}, {"Transfer-Encoding": "chunked"})
    for framing in framings:
        with wire.connect() as connection:
            connection.send(request_bytes(method, path, {**PLAIN, **given, **framing}))
            answer = connection.read_answer(method)
            assert (answer.status, answer.code) == (401, "unauthorized"), framing
            assert "Bearer" in answer["www-authenticate"]
            assert connection.at_end()


def test_whoever_waits_to_be_asked_for_the_body_is_refused_instead(wire: Wire) -> None:
    asking = {**PLAIN, "Content-Length": str(10 * MIB), "Expect": "100-continue"}
    with wire.connect() as connection:
        connection.send(request_bytes("POST", "/v1/stream/orders", asking))
        assert connection.read_until(b"\r\n") == b"HTTP/1.1 401 Unauthorized"


def test_with_a_token_bodies_may_come_in_pieces(wire: Wire) -> None:
    name = fresh("late")
    with wire.connect() as connection:
        head = {**WRITER, "Content-Length": str(4 * len(PIECE))}
        connection.send(request_bytes("PUT", f"/v1/stream/{name}", head))
        for _ in range(4):
            connection.send(PIECE)
        assert connection.read_answer("PUT").status == 201
        chunk = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
        head = {**WRITER, "Transfer-Encoding": "chunked", "Expect": "100-continue"}
        connection.send(request_bytes("POST", f"/v1/stream/{name}", head))
        assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
        connection.send(chunk * 2 + b"0\r\n\r\n")
        assert connection.read_answer("POST").status == 204
    assert len(wire.call("GET", f"{name}?offset=-1", WRITER).body) == 6 * len(PIECE)


def test_strangers_have_little_room_and_take_none_from_others(wire: Wire) -> None:
    """Where a body may come without a token that is known, as with the answer to a wake."""
    callback = "/v1/stream/__ds/subscriptions/s/callback"
    head = request_bytes("POST", callback, {**PLAIN, "Content-Length": str(4 * MIB)})
    statuses: list[int] = []
    with wire.connect() as waiting, wire.connect() as stranger:
        waiting.send(
            request_bytes("PUT", f"/v1/stream/{fresh('late')}", {**WRITER, "Content-Length": "4000000"})
        )
        waiting.send(b"x" * 1_000_000)
        stranger.send(head)
        try:
            for _ in range(4 * MIB // len(PIECE) - 1):
                stranger.send(PIECE)
        except ConnectionError:
            pass  # refused in the middle
        statuses.append(stranger.read_answer("POST").status)
        waiting.send(b"x" * 3_000_000)
        statuses.append(waiting.read_answer("PUT").status)
    assert statuses == [429, 201]
    with wire.connect() as stranger:
        small = request_bytes("POST", callback, PLAIN, b"{}" * 1000)
        stranger.send(small[:-1])
        stranger.send(small[-1:])
        assert stranger.read_answer("POST").status == 401, "looked at by the route: it has no wake's token"
