"""Values under CEL's rules, on Python's values: what is equal, what is less, what is an error."""

# pyright: reportUnknownVariableType=false
# Values are whatever JSON holds.

from __future__ import annotations

from typing import Any, Final, cast

from tailrace.watch.evaluation_cost import TEXT_SHIFT, charge

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1


class EvaluationError(Exception):
    """The expression has no value on this document, which therefore does not match."""


def cel_equal(one: Any, other: Any) -> bool:
    """`==`: across kinds false, numbers by value, lists and maps element by element."""
    kind: type[Any] = type(one)
    kind_other: type[Any] = type(other)
    if kind is kind_other:
        if kind is list:
            if len(one) != len(other):
                return False
            charge(len(one))
            return all(map(cel_equal, one, other))
        if kind is dict:
            mine, theirs = cast("dict[Any, Any]", one), cast("dict[Any, Any]", other)
            if len(mine) != len(theirs):
                return False
            charge(len(mine))
            return all(key in theirs and cel_equal(value, theirs[key]) for key, value in mine.items())
        if kind is str:
            _charge_texts(one, other)
        return one == other
    if kind is int and kind_other is float:
        return float(one) == other
    if kind is float and kind_other is int:
        return one == float(other)
    return False


def _charge_texts(one: str, other: str) -> None:
    """Two texts are compared no further than the shorter one reaches."""
    steps = min(len(one), len(other)) >> TEXT_SHIFT
    if steps:
        charge(steps)


def comparable_pair(one: Any, other: Any) -> tuple[Any, Any]:
    """Two values that have an order, in a form that Python orders as CEL does; else an error."""
    kind: type[Any] = type(one)
    kind_other: type[Any] = type(other)
    if kind is kind_other and kind in _ORDERED:
        if kind is str:
            _charge_texts(one, other)
        return one, other
    if kind is int and kind_other is float:
        return float(one), other
    if kind is float and kind_other is int:
        return one, float(other)
    raise EvaluationError


_ORDERED: Final = frozenset({int, float, str, bool})


def cel_in(value: Any, container: Any) -> bool:
    """`in`: an element of a list, or a key of a map."""
    kind: type[Any] = type(container)
    if kind is list:
        charge(len(container))
        return any(cel_equal(value, item) for item in container)
    if kind is dict:
        if type(value) is str:
            return value in container
        if type(value) in _KEYS:
            return False
    raise EvaluationError


_KEYS: Final = frozenset({int, bool, float})


def cel_add(one: Any, other: Any) -> Any:
    kind: type[Any] = type(one)
    if kind is not type(other):
        raise EvaluationError
    if kind is int:
        return _bounded(one + other)
    if kind is str:
        charge((len(one) + len(other)) >> TEXT_SHIFT)
    elif kind is list:
        charge(len(one) + len(other))
    elif kind is not float:
        raise EvaluationError
    return one + other


def cel_subtract(one: Any, other: Any) -> Any:
    kind = _same_number(one, other)
    return _bounded(one - other) if kind is int else one - other


def cel_multiply(one: Any, other: Any) -> Any:
    kind = _same_number(one, other)
    return _bounded(one * other) if kind is int else one * other


def cel_divide(one: Any, other: Any) -> Any:
    """Integers towards zero; doubles as IEEE 754 has it."""
    if _same_number(one, other) is int:
        if other == 0:
            raise EvaluationError
        quotient = abs(one) // abs(other)
        return _bounded(quotient if (one < 0) == (other < 0) else -quotient)
    if other == 0:
        if one == 0 or one != one:
            return float("nan")
        negative = (str(other)[0] == "-") != (one < 0)
        return float("-inf") if negative else float("inf")
    return one / other


def cel_modulo(one: Any, other: Any) -> Any:
    """The remainder has the sign of the dividend."""
    if type(one) is not int or type(other) is not int or other == 0:
        raise EvaluationError
    if one == INT_MIN and other == -1:
        raise EvaluationError
    rest = abs(one) % abs(other)
    return -rest if one < 0 else rest


def cel_negate(value: Any) -> Any:
    if type(value) is int:
        return _bounded(-value)
    if type(value) is float:
        return -value
    raise EvaluationError


def cel_size(value: Any) -> int:
    if type(value) in (str, list, dict):
        return len(value)
    raise EvaluationError


def _same_number(one: Any, other: Any) -> type:
    kind: type[Any] = type(one)
    if kind is not type(other) or (kind is not int and kind is not float):
        raise EvaluationError
    return kind


def _bounded(value: int) -> int:
    if INT_MIN <= value <= INT_MAX:
        return value
    raise EvaluationError
