"""Timestamps of RFC 3339: the two readings of them agree where both apply, and differ where they must."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.timestamps import (
    TIMESTAMP_MS_MAX,
    TIMESTAMP_MS_MIN,
    TIMESTAMP_NS_MAX,
    date_time_ms,
    format_rfc3339,
    format_rfc3339_ms,
    is_date_time,
    parse_rfc3339,
    parse_rfc3339_ms,
    parse_rfc3339_ns,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECONDS = timedelta(seconds=1)
MOMENTS = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))  # noqa: DTZ001 - the zone is added
OFFSETS = st.integers(-23 * 60 - 59, 23 * 60 + 59)
FRACTIONS = st.text("0123456789", max_size=9)


@given(MOMENTS, OFFSETS, FRACTIONS, st.booleans())
def test_all_readings_agree(moment: datetime, offset_minutes: int, digits: str, zulu: bool) -> None:
    zone = UTC if zulu else timezone(timedelta(minutes=offset_minutes))
    local = moment.replace(microsecond=0, tzinfo=zone)
    text = local.isoformat()
    text = text[:19] + (f".{digits}" if digits else "") + ("Z" if zulu else text[19:])
    seconds, nanos = (local - EPOCH) // SECONDS, int(digits.ljust(9, "0"))
    assert parse_rfc3339(text) == (seconds, nanos)
    assert parse_rfc3339_ms(text) == date_time_ms(text) == seconds * 1000 + nanos // 10**6
    assert parse_rfc3339_ns(text) == max(-TIMESTAMP_NS_MAX, min(seconds * 10**9 + nanos, TIMESTAMP_NS_MAX))
    assert is_date_time(text)
    for other in (text.lower(), text.replace("T", " ")):
        assert parse_rfc3339(other) == (seconds, nanos)
        assert date_time_ms(other) is None
        assert not is_date_time(other)
    assert parse_rfc3339(text[:19]) is None  # the zone is required


@given(st.text("0123456789-:.TtZz+ ", max_size=35))
def test_texts_of_the_same_characters_are_no_timestamps_by_accident(text: str) -> None:
    found = parse_rfc3339(text)
    assert (found is None) == (parse_rfc3339_ms(text) is None)
    assert is_date_time(text) == (date_time_ms(text) is not None)
    if date_time_ms(text) is not None:
        assert found is not None


@pytest.mark.parametrize(
    "text",
    [
        "2023-02-29T00:00:00Z",
        "2023-06-31T00:00:00.000Z",
        "2024-13-01T00:00:00Z",
        "2024-01-01T24:00:00Z",
        "2024-01-01T24:00:00.000Z",
        "2016-12-31T23:59:60Z",
        "2024-01-01T00:00:00+24:00",
        "2024-01-01T00:00:00+10:60",
        "2024-01-01T00:00:00+0100",
        "2024-01-01T00:00Z",
        "2024-01-01",
        "20240101T000000Z",
        "2024-01-01T00:00:00,5Z",
        "2024-01-01T00:00:00.Z",
        "2024-01-01T00:00:00.1234567890Z",
        "",
    ],
)
def test_what_is_no_timestamp_of_rfc_3339(text: str) -> None:
    assert (
        parse_rfc3339(text) is parse_rfc3339_ms(text) is parse_rfc3339_ns(text) is date_time_ms(text) is None
    )
    assert not is_date_time(text)


@pytest.mark.parametrize("text", ["0000-02-29T00:00:00Z", "0000-02-29T00:00:00.000Z"])
def test_the_year_zero_is_one_of_json_schema_only(text: str) -> None:
    assert date_time_ms(text) == parse_rfc3339_ms(text) == -62_162_121_600_000
    assert parse_rfc3339_ns(text) is None


@given(st.integers(2 * TIMESTAMP_MS_MIN, 2 * TIMESTAMP_MS_MAX))
def test_milliseconds_are_formatted_and_parsed_back(ms: int) -> None:
    text = format_rfc3339_ms(ms)
    assert len(text) == len("2026-01-31T12:00:00.000Z")
    assert date_time_ms(text) == min(max(ms, TIMESTAMP_MS_MIN), TIMESTAMP_MS_MAX)
    assert format_rfc3339(ms * 10**6 + 999_999) == text or ms * 10**6 >= TIMESTAMP_NS_MAX
