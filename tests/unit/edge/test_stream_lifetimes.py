"""How long an edge may answer for a stream, and when it has to renew it."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.cache import Slice
from tailrace.edge.stream_info import (
    NO_EXPIRY,
    InfoRequest,
    StreamInfoCache,
    StreamLifetime,
    parse_lifetime,
    renewal_due_at,
)
from tailrace.http.client import UpstreamResponse
from tailrace.protocol.offsets import encode_offset

DATE = ("Date", "Thu, 01 Jan 1970 00:01:40 GMT")  # 100 s


def _reply(*fields: tuple[str, str], status: int = 200) -> UpstreamResponse:
    return UpstreamResponse(status, [(name.encode(), value.encode()) for name, value in fields])


@pytest.mark.parametrize(
    ("fields", "lifetime"),
    [
        ([], NO_EXPIRY),
        # A TTL shows when it would end, too; but that moves.
        (
            [("Stream-TTL", "60"), ("Stream-Expires-At", "1970-01-01T00:02:00.000Z")],
            StreamLifetime(window_s=60),
        ),
        # 20 s later by the owner's clock, which may be up to a second further than it says.
        ([("Stream-Expires-At", "1970-01-01T00:02:00.000Z")], StreamLifetime(ends_at=1019.0)),
        ([("Stream-Expires-At", "some day")], StreamLifetime(ends_at=-inf)),
        ([("Stream-Retention", "60")], StreamLifetime(retained=True)),
        ([("Stream-TTL", "5"), ("Stream-Retention-Bytes", "9")], StreamLifetime(window_s=5, retained=True)),
    ],
)
def test_what_a_head_says(fields: list[tuple[str, str]], lifetime: StreamLifetime) -> None:
    assert parse_lifetime(_reply(DATE, *fields), sent_at=1000.0) == lifetime


def test_an_end_without_the_owners_clock_is_now() -> None:
    assert parse_lifetime(_reply(("Stream-Expires-At", "1970-01-01T00:02:00.000Z")), 1000.0).ends_at == -inf


@pytest.mark.parametrize(
    ("control", "age", "until"),
    [
        ("public, max-age=31536000, immutable", "", inf),
        ("public, max-age=60", "", 1060.0),
        ("private, max-age=60", "25", 1035.0),
        ("no-cache", "", -inf),
        ("no-store", "", -inf),
    ],
)
def test_how_long_an_answer_may_stay(control: str, age: str, until: float) -> None:
    fields = [("Cache-Control", control), *([("Age", age)] if age else [])]
    assert Slice.from_response(_reply(*fields), b"", now=1005.0, sent_at=1000.0).until == until


@given(window_s=st.integers(4, 10_000), pauses=st.lists(st.floats(0, 3), min_size=1, max_size=50))
def test_e16_renewals_are_rare_and_never_too_late(window_s: int, pauses: list[float]) -> None:
    """E-16, with answers that come at once. Pauses are in windows; only a stream that lives is hit."""
    sent = [0.0]  # the first read reaches the owner
    due: float | None = None
    now = last_hit = 0.0
    for pause in pauses:
        now += pause * window_s
        if due is not None and due <= now:
            sent.append(due)
            due = None
        if now >= sent[-1] + window_s:
            break
        last_hit = now
        due = due or renewal_due_at(window_s, sent[-1], sent[-1], now)
    if due is not None:
        sent.append(due)
    ends = sent[-1] + window_s
    assert last_hit + window_s <= ends <= last_hit + 1.25 * window_s + 1e-6
    assert all(later - sooner >= window_s / 4 - 1e-6 for sooner, later in pairwise(sent))


def test_what_a_stream_was_is_not_said_of_the_next_one_with_its_name() -> None:
    book = StreamInfoCache(lambda _name, _reason: None)
    asking = book.asking("a", 0.0)
    book.note_write("a", b"PUT", 201)
    book.note_head("a", _reply(("Stream-End-Offset", encode_offset(0, 5))), 1.0, asking)
    assert book.get("a").lifetime is None
    book.note_head("a", _reply(("Stream-TTL", "60")), 1.0, book.asking("a", 0.5))
    facts = book.get("a")
    facts.note_read(1.0, asking.generation)
    assert not facts.lives(1.0)
    facts.note_read(1.0, facts.generation)
    assert facts.lives(60.9)
    assert not facts.lives(61.0)


def test_an_offset_that_is_gone_leaves_what_is_behind_it() -> None:
    dropped: list[str] = []
    book = StreamInfoCache(lambda _name, reason: dropped.append(reason))
    head = _reply(("Stream-Retention-Bytes", "9"), ("Stream-End-Offset", encode_offset(0, 9)))
    facts = book.note_head("a", head, 1.0, InfoRequest(0.5, 0))
    gone = _reply(("Stream-Earliest-Offset", encode_offset(0, 4)), status=410)
    book.note_reply("a", gone, 2.0)
    assert (facts.earliest, dropped) == (encode_offset(0, 4), [])
    book.note_reply("a", _reply(status=410), 3.0)
    assert (facts.earliest, dropped) == ("", ["gone"])


def test_a_start_that_has_not_moved_is_not_shown() -> None:
    book = StreamInfoCache(lambda _name, _reason: None)
    book.note_reply("a", _reply(("Stream-Earliest-Offset", encode_offset(0, 0))), 1.0)
    assert book.get("a").earliest == ""
