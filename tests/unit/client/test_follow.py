"""The follower: no page skipped, none twice, whatever breaks."""

from __future__ import annotations

import pytest

from support.steps import Stage, answer
from tailrace.client.errors import ClientError
from tailrace.client.follow import Follower, Mode
from tailrace.client.model import Page
from tailrace.client.transport import BrokenConnectionError, CloseStream, NextChunk, OpenStream, Retries
from tailrace.client.wire import HttpResponse

CUT = BrokenConnectionError("reset", sent=True)
UNSENT = BrokenConnectionError("refused", sent=False)
LIVE = answer(200, content_type="text/event-stream")


def follower(mode: Mode = "long-poll", offset: str = "-1", **options: float) -> Follower:
    return Follower("s", offset=offset, mode=mode, retries=Retries(), **options)  # type: ignore[arg-type]


def page(body: bytes, next_offset: str, *, tail: bool = True, closed: bool = False) -> HttpResponse:
    headers = {"content_type": "application/json", "stream_next_offset": next_offset}
    if tail:
        headers["stream_up_to_date"] = "true"
    if closed:
        headers["stream_closed"] = "true"
    return answer(200, body, **headers)


def control(next_offset: str, *, closed: bool = False) -> bytes:
    end = b',"streamClosed":true' if closed else b',"streamCursor":"9"'
    offset = next_offset.encode()
    return b'event: control\ndata:{"streamNextOffset":"' + offset + b'","upToDate":true' + end + b"}\n\n"


def data(body: bytes) -> bytes:
    return b"event: data\ndata:" + body + b"\n\n"


def bodies(stage: Stage, reader: Follower, count: int) -> list[bytes]:
    pages: list[Page | None] = [stage.run(reader.advance()) for _ in range(count)]
    return [page.body for page in pages if page is not None]


def paths(stage: Stage) -> list[str]:
    return [request.path.partition("?")[2] for request in stage.requests]


def opened(stage: Stage) -> list[str]:
    return [e.request.path.partition("?")[2] for e in stage.effects if isinstance(e, OpenStream)]


def test_catch_up_then_poll() -> None:
    idle = answer(204, stream_next_offset="b", stream_up_to_date="true", stream_cursor="7")
    stage = Stage(page(b"[1]", "a", tail=False), page(b"[2]", "b"), idle, page(b"[3]", "c"))
    reader = follower()
    assert bodies(stage, reader, 3) == [b"[1]", b"[2]", b"[3]"]
    assert paths(stage) == [
        "offset=-1",
        "offset=a",
        "offset=b&live=long-poll",
        "offset=b&live=long-poll&cursor=7",
    ]
    assert reader.offset == "c"
    assert reader.up_to_date


def test_now_becomes_a_position_that_survives_a_reconnect() -> None:
    stage = Stage(page(b"[]", "t"), CUT, page(b"[1]", "u"))
    assert bodies(stage, follower(offset="now"), 1) == [b"[1]"]
    assert paths(stage) == ["offset=now", "offset=t&live=long-poll", "offset=t"]


@pytest.mark.parametrize("mode", ["long-poll", "sse"])
def test_a_closed_stream_ends_it(mode: Mode) -> None:
    stage = Stage(page(b"[1]", "a", closed=True))
    reader = follower(mode)
    assert bodies(stage, reader, 2) == [b"[1]"]
    assert stage.run(reader.advance()) is None
    assert reader.closed


def test_closed_while_polling() -> None:
    closed = answer(204, stream_next_offset="a", stream_up_to_date="true", stream_closed="true")
    stage = Stage(page(b"[1]", "a"), closed)
    assert bodies(stage, follower(), 2) == [b"[1]"]


def test_events_are_handed_out_with_their_position() -> None:
    whole = data(b"[1]") + control("a") + data(b"[2]") + control("b")
    stage = Stage(page(b"[]", "0"), LIVE, whole[:25], whole[25:90], whole[90:])
    reader = follower("sse")
    assert bodies(stage, reader, 1) == [b"[1]"]
    assert reader.offset == "a"
    assert bodies(stage, reader, 1) == [b"[2]"]
    assert reader.offset == "b"
    assert opened(stage) == ["offset=0&live=sse"]


def test_data_without_its_position_is_read_again() -> None:
    stage = Stage(page(b"[]", "0"), LIVE, data(b"[1]") + control("a") + data(b"[2]"), CUT, page(b"[2]", "b"))
    assert bodies(stage, follower("sse"), 2) == [b"[1]", b"[2]"]
    assert paths(stage) == ["offset=-1", "offset=a"]
    assert sum(isinstance(effect, CloseStream) for effect in stage.effects) == 1


def test_data_left_over_from_a_lost_connection_is_not_mixed_in() -> None:
    stage = Stage(
        page(b"[]", "0"),
        LIVE,
        data(b"[1]"),
        CUT,
        page(b"[]", "0"),
        LIVE,
        control("0") + data(b"[1]") + control("a"),
    )
    assert bodies(stage, follower("sse"), 1) == [b"[1]"]
    assert stage.left == 0


def test_rotation_reconnects_at_once() -> None:
    stage = Stage(
        page(b"[]", "0"), LIVE, control("0"), None, page(b"[]", "0"), LIVE, data(b"[1]") + control("a")
    )
    assert bodies(stage, follower("sse"), 1) == [b"[1]"]
    assert stage.pauses == []
    assert opened(stage)[1] == "offset=0&live=sse&cursor=9"


def test_an_event_stream_that_ends_empty_is_a_fault() -> None:
    stage = Stage(page(b"[]", "0"), LIVE, None, page(b"[1]", "a"))
    assert bodies(stage, follower("sse"), 1) == [b"[1]"]
    assert len(stage.pauses) == 1


def test_a_stream_that_got_its_type_meanwhile_is_looked_at_again() -> None:
    unset = answer(
        200, content_type="application/octet-stream", stream_next_offset="0", stream_up_to_date="true"
    )
    stage = Stage(unset, LIVE, page(b"[1]", "a"))
    pages = stage.run(follower("sse").advance())
    assert pages is not None
    assert pages.entries == [1]
    assert not any(isinstance(effect, NextChunk) for effect in stage.effects)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
@pytest.mark.parametrize("mode", ["long-poll", "sse"])
def test_what_does_not_pass_is_raised(mode: Mode, status: int) -> None:
    stage = Stage(page(b"[]", "0"), answer(status))
    with pytest.raises(ClientError) as caught:
        stage.run(follower(mode).advance())
    assert caught.value.status == status


@pytest.mark.parametrize("fault", [CUT, UNSENT, answer(503), answer(429), answer(500), answer(408)])
@pytest.mark.parametrize("mode", ["long-poll", "sse"])
def test_what_passes_is_waited_out(mode: Mode, fault: HttpResponse | BrokenConnectionError) -> None:
    stage = Stage(page(b"[]", "0"), *[fault] * 50, page(b"[1]", "a"))
    assert bodies(stage, follower(mode), 1) == [b"[1]"]
    assert len(stage.pauses) == 50


def test_a_server_never_reached_is_reported() -> None:
    stage = Stage(*[UNSENT] * 100)
    with pytest.raises(ClientError) as caught:
        stage.run(follower().advance())
    assert caught.value.code == "connect_failed"
    assert stage.left == 100 - Retries().attempts_max


def test_patience_can_be_limited() -> None:
    stage = Stage(page(b"[]", "0"), CUT)
    with pytest.raises(ClientError) as caught:
        stage.run(follower(give_up_s=0.0).advance())
    assert caught.value.code == "connection_lost"


def test_nonsense_from_the_server_is_an_error_not_a_loop() -> None:
    stage = Stage(page(b"[]", "0"), LIVE, b"event: control\ndata:nonsense\n\n")
    with pytest.raises(ClientError) as caught:
        stage.run(follower("sse").advance())
    assert caught.value.code == "invalid_answer"


def test_modes_are_two() -> None:
    with pytest.raises(ValueError, match="long-poll"):
        follower("websocket")  # type: ignore[arg-type]
