"""Timestamps of schemas and lenses: RFC 3339 with upper-case T and Z, and Unix milliseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

_INSTANT = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?"
    r"(?:Z|([+-])([0-9]{2}):([0-9]{2}))"
)
_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_YEARS_400_MS = 146_097 * 86_400_000
TIMESTAMP_MS_MIN: Final = -62_135_596_800_000  # 0001-01-01T00:00:00Z
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z


def is_date_time(text: str) -> bool:
    """Whether the text is a valid timestamp."""
    return _match(text) is not None


def _match(text: str) -> re.Match[str] | None:
    match = _INSTANT.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    if not 1 <= month <= 12 or not 1 <= day <= _DAYS[month - 1] or hour > 23 or minute > 59 or second > 59:
        return None
    if month == 2 and day == 29 and (year % 4 or (year % 100 == 0 and year % 400)):
        return None
    if match[8] is not None and (int(match[9]) > 23 or int(match[10]) > 59):
        return None
    return match


def to_unix_ms(text: str) -> int | None:
    """Unix milliseconds, rounded down; None if the text is not a timestamp."""
    match = _match(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    # The calendar repeats every 400 years, and Python's begins with year 1.
    at = datetime(year + 400 if year < 400 else year, month, day, hour, minute, second, tzinfo=UTC)
    ms = (at - _EPOCH) // timedelta(milliseconds=1)
    if year < 400:
        ms -= _YEARS_400_MS
    ms += int(match[7].ljust(9, "0")) // 1_000_000 if match[7] else 0
    if match[8] is not None:
        offset_ms = (int(match[9]) * 60 + int(match[10])) * 60_000
        ms += offset_ms if match[8] == "-" else -offset_ms
    return ms


def from_unix_ms(ms: int) -> str:
    """Format Unix milliseconds; times outside the years 1 to 9999 are clamped."""
    at = _EPOCH + timedelta(milliseconds=min(max(ms, TIMESTAMP_MS_MIN), TIMESTAMP_MS_MAX))
    return at.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
