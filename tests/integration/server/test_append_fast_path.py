"""Repeated appends take a short way through the server, and are answered as on the long one.

The same requests go to two streams: to one with a head that repeats, so that it is recognised, to the other
with a header that changes every time, so that it never is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from support.wire import Answer, Wire, fresh

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"
# The server learns one head in eight; twice as many repeats make it certain.
REPEATS = 16
_different = count()


class Pair:
    """Two streams that are told the same."""

    def __init__(self, http: Wire, content_type: str, **headers: str) -> None:
        self.http = http
        self.content_type = content_type
        self.short, self.long = fresh(), fresh()
        self.do(lambda name: http.put(name, content_type, **headers))

    def do(self, call: Callable[[str], Answer]) -> None:
        assert call(self.short).status == call(self.long).status

    def append(self, body: str, *, content_type: str | None = None) -> Answer:
        """Appends to both; the answers are the same."""
        kind = content_type or self.content_type
        short = self.http.post(self.short, kind, body)
        long = self.http.post(self.long, kind, body, x_different=str(next(_different)))
        assert short.status == long.status
        assert short.code == long.code
        for header in ("stream-next-offset", "stream-closed", "retry-after", "content-type"):
            assert short.get(header) == long.get(header), header
        return short

    def warm(self, body: str) -> None:
        for _ in range(REPEATS):
            assert self.append(body).status == 204

    def read(self) -> bytes:
        short, long = self.http.get(self.short), self.http.get(self.long)
        assert short.body == long.body
        return short.body


@pytest.mark.parametrize(
    ("kind", "body", "page"), [(TEXT, "abc", b"abc"), (BYTES, "abc", b"abc"), (JSON, "[1]", b"1,")]
)
def test_entries_arrive_once_and_in_order(http: Wire, kind: str, body: str, page: bytes) -> None:
    pair = Pair(http, kind)
    pair.warm(body)
    joined = page * REPEATS
    assert pair.read() == (b"[" + joined.rstrip(b",") + b"]" if kind == JSON else joined)


def test_arrays_single_values_and_refusals_of_json(http: Wire) -> None:
    pair = Pair(http, JSON)
    pair.warm("[1,2]")
    assert pair.append("[3,4]").status == 204
    assert pair.append('"five').code == "invalid_json"
    assert pair.append("[1,2}").code == "invalid_json"
    assert pair.append("[   ]").code == "empty_array"
    assert pair.append("[{}, ").code == "invalid_json"
    assert pair.append('"\u00e9" ').status == 204
    assert pair.append(" 77  ").status == 204
    assert pair.read().startswith(b"[1,2,1,2")


def test_a_closed_stream_takes_no_more(http: Wire) -> None:
    pair = Pair(http, TEXT)
    pair.warm("x")
    pair.do(lambda name: http.post(name, None, None, stream_closed="true"))
    assert pair.append("y").code == "stream_closed"


def test_a_deleted_stream_is_gone_and_a_new_one_is_judged_afresh(http: Wire) -> None:
    pair = Pair(http, TEXT)
    pair.warm("x")
    pair.do(http.delete)
    assert pair.append("x").status == 404
    pair.do(lambda name: http.put(name, JSON))
    assert pair.append("x").code == "content_type_mismatch"
    pair.do(http.delete)
    pair.do(lambda name: http.put(name, TEXT))
    assert pair.append("x").status == 204
    assert pair.read() == b"x"


def test_a_stream_kept_for_its_forks_is_gone(http: Wire) -> None:
    pair = Pair(http, TEXT)
    pair.warm("x")
    pair.do(lambda name: http.put(f"{name}-fork", TEXT, stream_forked_from=f"/v1/stream/{name}"))
    pair.do(http.delete)
    assert pair.append("x").status == 410


def test_a_stream_with_a_lifetime_is_renewed_as_ever(http: Wire) -> None:
    pair = Pair(http, TEXT, stream_ttl="3600")
    pair.warm("x")
    assert pair.append("y").status == 204
    assert pair.read() == b"x" * REPEATS + b"y"


def test_a_stream_without_a_type_is_bound_by_its_first_append(http: Wire) -> None:
    pair = Pair(http, JSON)
    pair.warm("1")
    pair.do(http.delete)
    pair.do(http.put)
    assert pair.append("2").status == 204
    assert pair.append("x", content_type=TEXT).code == "content_type_mismatch"
    assert http.head(pair.short)["content-type"] == JSON


def test_spellings_of_one_type_are_one_type(http: Wire) -> None:
    pair = Pair(http, "text/plain")
    for _ in range(REPEATS):
        assert pair.append("x", content_type="Text/Plain; charset=utf-8").status == 204
    assert pair.read() == b"x" * REPEATS
