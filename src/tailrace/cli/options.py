"""Option types and values that several commands share: durations, times, sizes, scopes."""

from __future__ import annotations

import re
import time
from typing import Annotated, Final

from cyclopts import Parameter

from tailrace.cli.errors import UsageError

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SPAN: Final = re.compile(r"([0-9]{1,12})([smhd])")
# Looks like RFC 3339; the server validates it.
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ].+")
_UNIX_NS: Final = re.compile(r"[0-9]{13,}")


def parse_lifetime_s(text: str) -> int | None:
    """The value of `--expires` in seconds; None for `never`."""
    return None if text == "never" else parse_span_s(text, "--expires")


def parse_span_s(text: str, flag: str) -> int:
    """`90s`, `30m`, `8h` or `90d` in seconds."""
    if (match := _SPAN.fullmatch(text)) is None:
        raise UsageError(f"{flag}: {text!r} is not a duration such as 90s, 30m, 8h or 90d")
    return int(match[1]) * _SECONDS[match[2]]


def parse_future_time(text: str, flag: str) -> str:
    """An absolute time."""
    if _TIME.fullmatch(text) is None:
        raise UsageError(f"{flag}: {text!r} is not an RFC 3339 time such as 2026-01-31T12:00:00Z")
    return text


def parse_past_time(text: str, flag: str) -> str:
    """A time for the server. A duration is subtracted from now: `1h` is an hour ago."""
    if _TIME.fullmatch(text) or _UNIX_NS.fullmatch(text):
        return text
    if _SPAN.fullmatch(text) is None:
        raise UsageError(
            f"{flag}: {text!r} is not a time: use RFC 3339 (2026-01-31T12:00:00Z), Unix nanoseconds, "
            "or a duration before now (90s, 15m, 1h, 7d)"
        )
    return str(max(0, time.time_ns() - parse_span_s(text, flag) * 1_000_000_000))


def parse_size_bytes(text: str, flag: str) -> int:
    """Bytes, written as in every setting: `64MiB`."""
    return _parse_setting(text, flag, "bytes")


def parse_span_ms(text: str, flag: str) -> int:
    """Milliseconds, written as in every setting: `250ms`, `30m`."""
    return _parse_setting(text, flag, "ms")


def _parse_setting(text: str, flag: str, unit: str) -> int:
    from tailrace.common.settings import Setting, SettingsError, parse_setting

    try:
        return int(parse_setting(Setting(name=flag, kind="int", default=0, help="", unit=unit), text))
    except SettingsError as error:
        raise UsageError(f"{flag}: {error}") from None


Scopes = Annotated[list[str], Parameter(help="read, write or manage; may be repeated.", negative="")]
Prefixes = Annotated[
    list[str] | None, Parameter(help="Only names with this prefix; may be repeated.", negative="")
]
Databases = Annotated[list[str] | None, Parameter(help="Only these databases; may be repeated.", negative="")]
ActorId = Annotated[str | None, Parameter(help="The hub address, if it is not the subject.")]
