"""The event parser against every way a stream of bytes can be cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client import follow
from tailrace.client.follow import EventParser, ServerSentEvent

STREAM = (
    b": keep-alive\n\n"
    b'event: data\ndata:[{"n":1}]\n\n'
    b'event: control\ndata:{"streamNextOffset":"x"}\n\n'
    b"event: data\ndata: one\ndata:\ndata:  two\xff\n\n"
    b"id: 7\nretry: 5\n\n"
    b"data:crlf\r\n\r\n"
    b"data:cr\r\r"
)
EVENTS = [
    ServerSentEvent(b"data", b'[{"n":1}]'),
    ServerSentEvent(b"control", b'{"streamNextOffset":"x"}'),
    ServerSentEvent(b"data", b"one\n\n two\xff"),
    ServerSentEvent(b"message", b"crlf"),
    ServerSentEvent(b"message", b"cr"),
]


def test_whole() -> None:
    assert EventParser().feed(STREAM) == EVENTS


def test_byte_by_byte() -> None:
    parser = EventParser()
    assert [event for byte in STREAM for event in parser.feed(bytes([byte]))] == EVENTS


@given(st.lists(st.integers(0, len(STREAM))))
def test_cut_anywhere(cuts: list[int]) -> None:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


def test_an_event_without_its_blank_line_is_not_one() -> None:
    assert EventParser().feed(b"event: data\ndata:half\n") == []


def test_an_event_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "EVENT_BYTES_MAX", 100)
    parser = EventParser()
    parser.feed(b"data:" + b"x" * 80)
    with pytest.raises(follow.EventTooLargeError):
        parser.feed(b"x" * 80)


def test_the_bound_counts_all_lines_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "EVENT_BYTES_MAX", 100)
    parser = EventParser()
    with pytest.raises(follow.EventTooLargeError):
        for _ in range(10):
            parser.feed(b"data:" + b"x" * 40 + b"\n")
