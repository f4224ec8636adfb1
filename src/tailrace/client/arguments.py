"""Checks of arguments before anything is sent. A message names the argument, its bounds and its value."""

from __future__ import annotations

from collections.abc import Sequence

INTEGER_MAX = 2**53 - 1  # of the protocol: what every client can represent


def check_integer(name: str, value: object, least: int = 0, most: int = INTEGER_MAX) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}: {value!r}")


def check_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """A time span; infinity is one, NaN is not."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value > 0 or (may_be_zero and value == 0):
            return
    least = "of 0 or more" if may_be_zero else "greater than 0"
    raise ValueError(f"{name} must be a number of seconds {least}: {value!r}")


def check_text(name: str, value: object, bytes_max: int) -> None:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= bytes_max:
        raise ValueError(f"{name} must be a text of 1 to {bytes_max} bytes: {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: {value!r}")
