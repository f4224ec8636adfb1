"""Timestamps of RFC 3339, always with a time zone, and durations in headers and query parameters."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from tailrace.common.errors import TailraceError

_DURATION = re.compile(r"(0|[1-9][0-9]*)([smhd]?)")
_TIMEOUT = re.compile(r"([0-9]{1,12})(ms|s|m|h)?")
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_RFC3339 = re.compile(
    rf"{_DATE}[Tt ]{_TIME}(?:\.([0-9]{{1,9}}))?(?:[Zz]|([+-])([01][0-9]|2[0-3]):([0-5][0-9]))"
)
# UTC, with whole seconds or milliseconds: what `fromisoformat` reads by itself, several times faster.
_COMMON_FORM = re.compile(rf"{_DATE}T{_TIME}(?:\.[0-9]{{3}})?Z")
_NANOS = re.compile(r"[0-9]{1,19}")
_DURATION_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIMEOUT_UNIT_MS = {None: 1000, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_LOCAL = datetime.fromisoformat("1970-01-01")  # in the zone of a timestamp
_YEARS_400_S = 146_097 * 86_400
DURATION_S_MAX = 2**53 - 1
_DURATION_DIGITS_MAX = len(str(DURATION_S_MAX))
# Timestamps are stored in 64 bits; later ones (after the year 2262) are clamped to the maximum.
TIMESTAMP_NS_MAX = 2**63 - 1
TIMESTAMP_MS_MIN: Final = -62_135_596_800_000  # 0001-01-01T00:00:00Z
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z


def parse_duration_s(text: str, header: str) -> int:
    """A lifetime in whole seconds: `3600`, `90s`, `5m`, `1h`, `7d`; no signs, fractions or leading zeros."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise TailraceError(
            "invalid_header", f"{header} must be whole seconds or <n>s, <n>m, <n>h or <n>d", header=header
        )
    too_long = len(match[1]) > _DURATION_DIGITS_MAX
    window_s = 0 if too_long else int(match[1]) * _DURATION_UNIT_S[match[2]]
    if too_long or window_s > DURATION_S_MAX:
        message = f"{header} must be at most {DURATION_S_MAX} seconds"
        raise TailraceError("invalid_header", message, header=header)
    return window_s


def parse_timeout_ms(text: str) -> int:
    """A long-poll wait: `<n>ms|s|m|h`, or a bare integer of seconds."""
    match = _TIMEOUT.fullmatch(text)
    if not match:
        raise TailraceError("invalid_timeout", "timeout must be whole seconds or <n>ms, <n>s, <n>m or <n>h")
    return int(match[1]) * _TIMEOUT_UNIT_MS[match[2]]


def parse_rfc3339(text: str) -> tuple[int, int] | None:
    """Unix seconds and nanoseconds of RFC 3339, with any zone; None if invalid.

    Years are 0000 to 9999, there are no leap seconds, and a space or lower-case letters are accepted.
    """
    match = _RFC3339.fullmatch(text)
    if not match:
        return None
    # The calendar repeats every 400 years, and Python's begins with year 1.
    year_0 = text.startswith("0000")
    try:
        since = datetime.fromisoformat("0400" + text[4:19] if year_0 else text[:19]) - _EPOCH_LOCAL
    except ValueError:
        return None
    seconds = since.days * 86_400 + since.seconds
    if year_0:
        seconds -= _YEARS_400_S
    fraction, sign, hours, minutes = match.groups()
    if sign:
        ahead_s = int(hours) * 3600 + int(minutes) * 60
        seconds += ahead_s if sign == "-" else -ahead_s
    return seconds, int(fraction.ljust(9, "0")) if fraction else 0


def parse_rfc3339_ns(text: str) -> int | None:
    """RFC 3339 as Unix nanoseconds; None if invalid. The year 0000 is not accepted."""
    found = None if text.startswith("0000") else parse_rfc3339(text)
    if found is None:
        return None
    instant_ns = found[0] * 1_000_000_000 + found[1]
    return max(-TIMESTAMP_NS_MAX, min(instant_ns, TIMESTAMP_NS_MAX))


def parse_rfc3339_ms(text: str) -> int | None:
    """RFC 3339 as Unix milliseconds, rounded down; None if invalid."""
    moment = _common_moment(text)
    if moment is not None:
        since = moment - _EPOCH
        return (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000
    found = parse_rfc3339(text)
    return None if found is None else found[0] * 1000 + found[1] // 1_000_000


def date_time_ms(text: str) -> int | None:
    """Unix milliseconds of a `date-time` of JSON Schema, which has an upper-case T and Z; None if invalid."""
    return parse_rfc3339_ms(text) if text[10:11] == "T" and text[-1] != "z" else None


def is_date_time(text: str) -> bool:
    """Whether the text is a `date-time` of JSON Schema."""
    return _common_moment(text) is not None or date_time_ms(text) is not None


def _common_moment(text: str) -> datetime | None:
    """A timestamp in the common form; None if it has another one, an invalid day, or the year 0000."""
    if not _COMMON_FORM.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def parse_timestamp_ns(text: str) -> int | None:
    """RFC 3339 or integer Unix nanoseconds."""
    if _NANOS.fullmatch(text):
        value = int(text)
        return value if value < 2**63 else None
    return parse_rfc3339_ns(text)


def format_rfc3339(ns: int) -> str:
    """RFC 3339 in UTC with milliseconds, the format of every timestamp that the server writes."""
    return format_rfc3339_ms(TIMESTAMP_MS_MAX if ns >= TIMESTAMP_NS_MAX else ns // 1_000_000)


def format_rfc3339_ms(ms: int) -> str:
    """The same of Unix milliseconds; times outside the years 1 to 9999 are clamped."""
    moment = _EPOCH + timedelta(milliseconds=min(max(ms, TIMESTAMP_MS_MIN), TIMESTAMP_MS_MAX))
    return moment.isoformat(timespec="milliseconds")[:-6] + "Z"
