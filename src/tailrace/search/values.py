"""The one value function: what a field's values are in a record.

Server, tail index, scans and index jobs all call this, so that they cannot disagree. A field has a list of
0..n values: the leaves at its pointer, arrays flattened, each converted by the field's kind; leaves that do
not convert are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any, Final, cast

from tailrace.schema.pointer import ABSENT, parse_pointer, resolve_pointer
from tailrace.schema.search_fields import Field

Value = str | int | float | bool
Convert = Callable[[object], Value | None]

INT64_MAX: Final = 2**63 - 1

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# UTC, whole seconds or milliseconds: as nearly every program writes it.
_SECOND: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_COMMON_TIMESTAMP: Final = re.compile(rf"{_SECOND}(?:\.[0-9]{{3}})?Z")
# Many of them with milliseconds, a line feed between two.
_COMMON_TIMESTAMP_LINES: Final = re.compile(rf"{_SECOND}\.[0-9]{{3}}Z(?:\n{_SECOND}\.[0-9]{{3}}Z)*+")
_TIMESTAMP: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])"
    r"(?:\.([0-9]{1,9}))?(?:[Zz]|([+-])([01][0-9]|2[0-3]):([0-5][0-9])))?"
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = _EPOCH.toordinal()
_DAYS_400_YEARS: Final = 146_097
_BOOLS: Final = {"true": True, "false": False}


def field_values(record: object, field: Field, version: int) -> list[Value]:
    """The values of a field in a record, promoted to `version`. A record that is no object has none."""
    pointer = field.pointer_at(version)
    if pointer is None:
        return []
    tokens = parse_pointer(pointer)
    assert tokens is not None, "pointers are checked when a registry is installed"
    return extract_values(record, tokens, converter_for(field))


def extract_values(record: object, tokens: tuple[str, ...], convert: Convert) -> list[Value]:
    """The same where the pointer of a field was parsed and its converter chosen: for many records."""
    if not isinstance(record, dict):
        return []
    found = resolve_pointer(cast("object", record), tokens)
    if not isinstance(found, list):
        value = None if found is ABSENT else convert(found)
        return [] if value is None else [value]
    values = (convert(leaf) for leaf in flatten_leaves(cast("object", found)))
    return [value for value in values if value is not None]


def flatten_leaves(value: object) -> list[object]:
    """Arrays flattened to whatever depth; a pointer that finds nothing has no leaves."""
    if value is ABSENT:
        return []
    if not isinstance(value, list):
        return [value]
    found: list[object] = []
    waiting: list[object] = [cast("object", value)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(reversed(cast("list[object]", item)))
        else:
            found.append(item)
    return found


def converter_for(field: Field) -> Convert:
    """A leaf into the field's canonical value, or None if it has none. Text stays as it is: see `analyze`."""
    if field.kind == "keyword" and field.normalizer == "lowercase_v1":
        return to_lowercase
    return _CONVERTERS[field.kind]


def to_string(leaf: object) -> str | None:
    if not isinstance(leaf, str):
        return None
    # Half a surrogate pair cannot be stored anywhere; it counts as the replacement character.
    return leaf if leaf.isascii() else _SURROGATES.sub("�", leaf)


def to_lowercase(leaf: object) -> str | None:
    text = to_string(leaf)
    return None if text is None else text.lower()


def to_integer(leaf: object) -> int | None:
    """Signed 64 bits. A float counts if it is whole; at the very edge it may have been rounded: no value."""
    if isinstance(leaf, bool):
        return None
    if isinstance(leaf, int):
        return _int64(leaf)
    if isinstance(leaf, float):
        return int(leaf) if abs(leaf) < 2.0**63 and leaf.is_integer() else None
    if isinstance(leaf, str):
        return _integer_in(leaf)
    return None


def to_float(leaf: object) -> float | None:
    """A finite double; zero has no sign."""
    if isinstance(leaf, bool):
        return None
    if isinstance(leaf, int | float):
        try:
            number = float(leaf)
        except OverflowError:
            return None
    elif isinstance(leaf, str) and _DECIMAL.fullmatch(leaf):
        number = float(leaf)
    else:
        return None
    return number + 0.0 if math.isfinite(number) else None


def to_date(leaf: object) -> int | None:
    """Unix milliseconds, cut off towards zero; instants and days of the calendar; integers as text."""
    if isinstance(leaf, str):
        instant_ms = _instant_ms(leaf)
        return _integer_in(leaf) if instant_ms is None else instant_ms
    if isinstance(leaf, bool):
        return None
    if isinstance(leaf, int):
        return _int64(leaf)
    if isinstance(leaf, float):
        return int(leaf) if abs(leaf) < 2.0**63 else None
    return None


def parse_dates(distinct: Collection[object]) -> dict[object, Value | None]:
    """`to_date` of many leaves. Times as nearly every program writes them share their minutes."""
    texts = [leaf for leaf in distinct if type(leaf) is str]
    found: dict[object, Value | None] = {}
    if texts and _COMMON_TIMESTAMP_LINES.fullmatch("\n".join(texts)):
        minutes = {minute: _instant_ms(f"{minute}:00.000Z") for minute in {text[:16] for text in texts}}
        for text in texts:
            minute_ms = minutes[text[:16]]
            found[text] = None if minute_ms is None else minute_ms + int(text[17:19] + text[20:23])
        if len(texts) == len(distinct):
            return found
    return found | {leaf: to_date(leaf) for leaf in distinct if leaf not in found}


def timestamp_bounds(found: Sequence[object]) -> tuple[int, int] | None:
    """The bounds of times that are written as nearly every program does: such texts sort as their times do.

    None if that is not so of all of them.
    """
    if set(map(type, found)) != {str}:
        return None
    texts = cast("Sequence[str]", found)
    if not _COMMON_TIMESTAMP_LINES.fullmatch("\n".join(texts)):
        return None
    earliest, latest = _instant_ms(min(texts)), _instant_ms(max(texts))
    return None if earliest is None or latest is None else (earliest, latest)


def to_bool(leaf: object) -> bool | None:
    if isinstance(leaf, bool):
        return leaf
    if isinstance(leaf, str) and len(leaf) <= 5:
        return _BOOLS.get(leaf.lower())
    return None


def _int64(number: int) -> int | None:
    return number if -INT64_MAX - 1 <= number <= INT64_MAX else None


def _integer_in(text: str) -> int | None:
    # 19 digits and a sign are the most that fit.
    return _int64(int(text)) if len(text) <= 20 and _INTEGER.fullmatch(text) else None


def _instant_ms(text: str) -> int | None:
    if _COMMON_TIMESTAMP.fullmatch(text):
        try:
            since = datetime.fromisoformat(text) - _EPOCH
        except ValueError:
            pass  # no such day, or the year 0
        else:
            return (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        return None
    day_ms = _day_ms(match[1])
    hour, minute, second, fraction, sign, ahead_hours, ahead_minutes = match.groups()[1:]
    if day_ms is None or hour is None:
        return day_ms
    seconds = int(hour) * 3600 + int(minute) * 60 + int(second)
    if sign:
        ahead = int(ahead_hours) * 3600 + int(ahead_minutes) * 60
        seconds -= ahead if sign == "+" else -ahead
    return day_ms + seconds * 1000 + (int((fraction + "00")[:3]) if fraction else 0)


@lru_cache(1024)
def _day_ms(text: str) -> int | None:
    """Midnight of a day; records of one time share their days."""
    year = int(text[:4])
    try:
        # Python's calendar begins with year 1; it repeats every 400 years.
        days = date(year or 400, int(text[5:7]), int(text[8:])).toordinal() - _EPOCH_DAY
    except ValueError:
        return None
    return (days if year else days - _DAYS_400_YEARS) * 86_400_000


_CONVERTERS: Final[dict[str, Convert]] = {
    "keyword": to_string,
    "text": to_string,
    "integer": to_integer,
    "float": to_float,
    "date": to_date,
    "bool": to_bool,
}


def excludes_bounds(comparison: str, bound: Any, bounds: tuple[Any, Any]) -> bool:
    """Whether nothing from the least to the most of some values, all of one kind, stands so to a bound."""
    least, most = bounds
    match comparison:
        case ">":
            return most <= bound
        case ">=":
            return most < bound
        case "<":
            return least >= bound
        case "<=":
            return least > bound
        case _:
            return not least <= bound <= most
