"""Parsing and formatting of durations and timestamps in headers and query parameters."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tailrace.common.errors import TailraceError

_DURATION = re.compile(r"(0|[1-9][0-9]*)([smhd]?)")
_TIMEOUT = re.compile(r"([0-9]{1,12})(ms|s|m|h)?")
_RFC3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.([0-9]{1,9}))?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_NANOS = re.compile(r"[0-9]{1,19}")
_DURATION_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIMEOUT_UNIT_MS = {None: 1000, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DURATION_S_MAX = 2**53 - 1
_DURATION_DIGITS_MAX = len(str(DURATION_S_MAX))
# Timestamps are stored in 64 bits; later ones (after the year 2262) are clamped to the maximum.
TIMESTAMP_NS_MAX = 2**63 - 1


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


def parse_rfc3339_ns(text: str) -> int | None:
    """RFC 3339 with any zone and up to nanoseconds, as Unix nanoseconds; None if invalid."""
    match = _RFC3339.fullmatch(text)
    if not match:
        return None
    zone = "+00:00" if match[4] in "Zz" else match[4]
    try:
        moment = datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}")
    except ValueError:
        return None
    whole_s = (moment - _EPOCH) // timedelta(seconds=1)
    instant_ns = whole_s * 1_000_000_000 + int((match[3] or "0").ljust(9, "0"))
    return max(-TIMESTAMP_NS_MAX, min(instant_ns, TIMESTAMP_NS_MAX))


def parse_timestamp_ns(text: str) -> int | None:
    """RFC 3339 or integer Unix nanoseconds."""
    if _NANOS.fullmatch(text):
        value = int(text)
        return value if value < 2**63 else None
    return parse_rfc3339_ns(text)


def format_rfc3339(ns: int) -> str:
    """RFC 3339 in UTC with milliseconds, the format of every timestamp that the server writes."""
    if ns >= TIMESTAMP_NS_MAX:
        return "9999-12-31T23:59:59.999Z"
    seconds, rest = divmod(ns, 1_000_000_000)
    moment = _EPOCH + timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"
