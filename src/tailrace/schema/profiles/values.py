"""Values of client records, taken as what a canonical record needs them to be."""

from __future__ import annotations

import math
from typing import Final

INTEGER_MAX: Final = 2**63 - 1


def to_trimmed(value: object) -> str | None:
    """A text without the space around it; None if nothing is left, or if it is no text."""
    return (value.strip() or None) if type(value) is str else None


def to_number(value: object) -> int | float | None:
    """A number that a double can hold; truth values are none."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int and -1.7e308 < value < 1.7e308:
        return value
    return None


def to_integer(value: object) -> int | None:
    """A number without a fraction, however it is written, that 64 bits can hold."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX:
        return value
    return None
