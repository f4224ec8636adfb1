"""JSON in the one form that everybody writes alike (RFC 8785)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Final, NoReturn, cast

_PLAIN_POWER_MIN: Final = -6  # ECMAScript writes 0.000001, but 1e-7
_PLAIN_POWER_MAX: Final = 21
_ESCAPED: Final = re.compile(r'["\\\x00-\x1f]')
_SHORT: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def canonical_json(text: bytes, *, without: str | None = None) -> bytes:
    """The canonical form of a JSON text, if wished without one member of the outermost object.

    ValueError for what has no such form: names that come twice, half a surrogate pair, numbers too great.
    """
    value = _decoder.decode(text.decode())
    if without is not None and isinstance(value, dict):
        cast("dict[str, object]", value).pop(without, None)
    parts: list[str] = []
    _write(cast("object", value), parts)
    return "".join(parts).encode()


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


# Every number is what JavaScript would read, whole ones too.
_decoder: Final = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_int=float, parse_float=float, parse_constant=_refuse_constant
)


def _write(value: object, parts: list[str]) -> None:
    if value is None or isinstance(value, bool):
        parts.append("null" if value is None else "true" if value else "false")
    elif isinstance(value, str):
        parts.append(_format_string(value))
    elif isinstance(value, float):
        parts.append(format_number(value))
    elif isinstance(value, dict):
        _write_object(cast("dict[str, object]", value), parts)
    else:
        parts.append("[")
        for position, item in enumerate(cast("Iterable[object]", value)):
            parts.append("," if position else "")
            _write(item, parts)
        parts.append("]")


def _write_object(value: dict[str, object], parts: list[str]) -> None:
    parts.append("{")
    # By UTF-16 units, as JavaScript compares.
    for position, name in enumerate(
        sorted(value, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    ):
        parts.append("," if position else "")
        parts.append(_format_string(name))
        parts.append(":")
        _write(value[name], parts)
    parts.append("}")


def _format_string(value: str) -> str:
    def escape(found: re.Match[str]) -> str:
        return _SHORT.get(found[0]) or f"\\u{ord(found[0]):04x}"

    return f'"{_ESCAPED.sub(escape, value)}"'


def format_number(value: float) -> str:
    """A number as ECMAScript writes it: the shortest digits that come back as the same number."""
    if not math.isfinite(value):
        raise ValueError("the number is too great")
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent_text = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    digits = (whole + fraction).lstrip("0")
    # The value is 0.<digits> times ten to this power.
    leading = len(whole + fraction) - len(digits)
    power = len(whole) - leading + int(exponent_text or "0")
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= power <= _PLAIN_POWER_MAX:
        return f"{sign}{digits}{'0' * (power - count)}"
    if 0 < power <= _PLAIN_POWER_MAX:
        return f"{sign}{digits[:power]}.{digits[power:]}"
    if _PLAIN_POWER_MIN < power <= 0:
        return f"{sign}0.{'0' * -power}{digits}"
    rest = f".{digits[1:]}" if count > 1 else ""
    return f"{sign}{digits[0]}{rest}e{power - 1:+d}"
