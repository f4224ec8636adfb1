"""Creating, appending, reading, forking and listing with the client, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.clients import OpenClient, name, open_client
from support.server import ServerProcess
from tailrace.client import Client, ClientError, Retries

__all__ = ["name", "open_client"]

JSON = "application/json"
TEXT = "text/plain"


@pytest.fixture
def client(server: ServerProcess, open_client: OpenClient) -> Any:
    return open_client(server.base_url)


def raised(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    return error.value.status, error.value.code


def test_create_is_idempotent(client: Any, name: str) -> None:
    stream = client.stream(name)
    info = stream.create(content_type=JSON, ttl=3600)
    assert info.created
    assert (info.content_type, info.ttl_s, info.closed) == (JSON, 3600, False)
    again = stream.create(content_type=JSON, ttl=timedelta(hours=1))
    assert not again.created
    with pytest.raises(ClientError) as caught:
        stream.create(content_type=TEXT)
    assert raised(caught) == (409, "stream_exists")


def test_create_with_content_and_closed(client: Any, name: str) -> None:
    stream = client.stream(name)
    info = stream.create(content_type=JSON, body=[1, 2], closed=True)
    assert info.closed
    page = stream.read()
    assert (page.entries, page.closed, page.next_offset) == ([1, 2], True, info.next_offset)


def test_expiry_in_the_past(client: Any, name: str) -> None:
    stream = client.stream(name)
    stream.create(expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(ClientError) as caught:
        stream.head()
    assert raised(caught) == (404, "not_found")


def test_values_become_messages(client: Any, name: str) -> None:
    stream = client.stream(name)
    stream.create(content_type=JSON)
    for data in ({"a": 1}, [1, [2]], "text", None, 1.5, b'{"as": "is"}', b"[3,4]"):
        stream.append(data)
    assert list(stream.entries()) == [{"a": 1}, 1, [2], "text", None, 1.5, {"as": "is"}, 3, 4]


def test_bytes_are_kept_exactly(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create()
    texts = [b"1.0", b"1e400", b"12345678901234567890123", b'{"b" :1, "a":"\\u00e9"}']
    for text in texts:
        stream.append(text)
    assert stream.read().raw_entries == texts


def test_the_first_append_gives_the_type(client: Any, name: str) -> None:
    stream = client.stream(name)
    stream.create()
    stream.append({"a": 1})
    assert client.stream(name).head().content_type == JSON
    assert stream.content_type == JSON


def test_a_handle_learns_the_type_of_a_stream(client: Any, name: str) -> None:
    client.stream(name).create(content_type=TEXT)
    stream = client.stream(name)
    stream.append("grüße\n")
    assert stream.content_type == TEXT
    assert stream.read().body == "grüße\n".encode()


def test_bytes(client: Any, name: str) -> None:
    stream = client.stream(name, content_type="application/octet-stream")
    stream.create()
    blob = bytes(range(256)) * 1000
    stream.append(blob)
    stream.append_many([b"a", b"b"])
    assert b"".join(stream.entries()) == blob + b"ab"


def test_append_many_in_several_requests(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create()
    messages = [{"n": n, "pad": "x" * 1000} for n in range(2500)]
    result = stream.append_many(messages)
    assert result.next_offset == stream.head().next_offset
    pages = list(stream.pages())
    assert len(pages) > 1
    assert [message for page in pages for message in page.entries] == messages
    assert stream.append_many([]) is None


def test_append_many_tells_how_far_it_got(server: ServerProcess, client: Any, name: str) -> None:
    stream = client.stream(name, content_type=TEXT)
    stream.create()

    def lines() -> Iterator[str]:
        yield "one"
        yield "two"
        with Client(server.base_url) as other:
            other.stream(name).close()
        yield "three"

    with pytest.raises(ClientError) as caught:
        stream.append_many(lines())
    assert raised(caught) == (409, "stream_closed")
    assert caught.value.extra["appended"] == 2
    assert stream.read().body == b"onetwo"


@pytest.mark.parametrize(
    ("content_type", "good", "bad", "count"),
    [
        (JSON, {"one": "x" * 1000}, object(), 2500),
        (JSON, {"one": "x" * 1000}, "\ud800", 2500),
        (TEXT, "one", 7, 2),
    ],
)
def test_append_many_tells_how_far_it_got_before_what_cannot_be_encoded(
    client: Any, name: str, content_type: str, good: Any, bad: Any, count: int
) -> None:
    stream = client.stream(name, content_type=content_type)
    stream.create()
    with pytest.raises(ClientError) as caught:
        stream.append_many([*[good] * count, bad, good])
    assert isinstance(caught.value, TypeError)
    assert raised(caught) == (0, "not_encodable")
    appended = caught.value.extra["appended"]
    assert isinstance(appended, int)
    assert 0 < appended <= count
    assert sum(page.body.count(b"one") for page in stream.pages()) == appended


def test_append_many_tells_how_far_it_got_before_its_iterable_failed(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=TEXT)
    stream.create()

    def lines() -> Iterator[str]:
        yield "one"
        yield "two"
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone") as caught:
        stream.append_many(lines())
    assert caught.value.__notes__ == ["2 items were appended before this"]
    assert stream.read().body == b"onetwo"


def test_keys(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create()
    stream.append([1, 2], key="ä/1")
    stream.append(3, key="b")
    stream.append(4)
    stream.append(5, key="ä/1")
    page = stream.read(key="ä/1")
    assert page.entries == [1, 2, 5]
    assert page.next_offset == stream.head().next_offset
    assert list(stream.entries(key="b")) == [3]
    assert list(stream.entries(key="none")) == []


def test_sequence(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create()
    stream.append(1, seq="09")
    with pytest.raises(ClientError) as caught:
        stream.append(2, seq="09")
    assert raised(caught) == (409, "seq_conflict")
    assert caught.value.answer_headers["stream-expected-seq"] == "09"
    assert not caught.value.outcome_unknown


def test_since(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create()
    for day in (1, 2, 3):
        stream.append(day, timestamp=datetime(2026, 1, day, tzinfo=UTC))
    assert stream.read(since=datetime(2026, 1, 2, tzinfo=UTC)).entries == [2, 3]
    assert list(stream.entries(since="2026-01-03T00:00:00+00:00")) == [3]


def test_reading_on(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create()
    first = stream.append(1)
    stream.append(2)
    assert stream.read(first.next_offset).entries == [2]
    tail = stream.read("now")
    assert tail.is_empty
    assert tail.up_to_date
    with pytest.raises(ClientError) as caught:
        stream.read("nonsense")
    assert raised(caught) == (400, "invalid_offset")


def test_close(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create()
    final = stream.append("last", close=True)
    assert final.closed
    assert stream.close().next_offset == final.next_offset
    with pytest.raises(ClientError) as caught:
        stream.append("later")
    assert raised(caught) == (409, "stream_closed")
    assert stream.head().closed


def test_delete(client: Any, name: str) -> None:
    stream = client.stream(name)
    stream.create()
    stream.delete()
    for operation in (stream.head, stream.read):
        with pytest.raises(ClientError) as caught:
            operation()
        assert caught.value.status == 404
    with pytest.raises(ClientError) as caught:
        client.stream(f"{name}/never").delete()
    assert raised(caught) == (404, "not_found")


def test_fork(client: Any, name: str) -> None:
    stream = client.stream(name, content_type=JSON)
    stream.create(body=[1, 2, 3, 4])
    middle = stream.append(5).next_offset
    stream.append(6)
    whole = stream.fork(f"{name}-whole")
    whole.append("own")
    assert list(whole.entries()) == [1, 2, 3, 4, 5, 6, "own"]
    assert list(stream.fork(f"{name}-middle", offset=middle).entries()) == [1, 2, 3, 4, 5]
    part = stream.fork(f"{name}-part", offset="-1", sub_offset=2, body=["new"])
    assert list(part.entries()) == [1, 2, "new"]
    assert list(stream.entries()) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ClientError) as caught:
        stream.fork(f"{name}-no", sub_offset=7)
    assert raised(caught) == (400, "invalid_fork")


def test_list(client: Any, name: str) -> None:
    names = [f"{name}/{letter}" for letter in "abcdefg"]
    for each in names:
        client.stream(each).create(content_type=JSON, body=[1])
    listed = list(client.streams(f"{name}/", page_size=3))
    assert [row.name for row in listed] == names
    assert listed[0].content_type == JSON
    assert listed[0].end_offset == client.stream(names[0]).head().next_offset
    assert [row.name for row in client.streams(f"{name}/", after=names[4])] == names[5:]
    assert list(client.streams(f"{name}/nothing")) == []


def test_names_of_every_kind(client: Any, name: str) -> None:
    for odd in ("with space", "ünï/cödé", "per%cent", "q?x#y", "a+b&c=d"):
        stream = client.stream(f"{name}/{odd}", content_type=TEXT)
        assert stream.create().created
        stream.append(odd)
        assert stream.read().body == odd.encode()
        assert next(iter(client.streams(f"{name}/{odd}"))).name == f"{name}/{odd}"


def test_nobody_there(open_client: OpenClient, server: ServerProcess) -> None:
    client = open_client("http://127.0.0.1:9", retries=Retries(attempts_max=2, delay_s_first=0.001))
    with pytest.raises(ClientError) as caught:
        client.stream("s").append(1)
    assert raised(caught) == (0, "connect_failed")
    assert not caught.value.outcome_unknown


def test_base_url_is_a_url(open_client: OpenClient) -> None:
    with pytest.raises(ValueError, match="base_url"):
        open_client("localhost:4437")
