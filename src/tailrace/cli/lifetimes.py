"""Lifetimes as people write them."""

from __future__ import annotations

from tailrace.cli.failures import UsageError


def lifetime_s(text: str) -> int | None:
    """`30m`, `8h` or `90d` in seconds; `never` is none."""
    factors = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    if text == "never":
        return None
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit()) or unit not in factors:
        raise UsageError(f"--expires {text!r} is not a lifetime such as 30m, 8h or 90d")
    return int(number) * factors[unit]
