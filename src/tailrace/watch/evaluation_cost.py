"""The cost of evaluating expressions, in steps: one value visited, or about a kibibyte of text.

Compiled closures charge the meter before they do expensive work. The CEL library can be neither metered nor
interrupted, so an upper bound is charged before it starts. Nodes outside of quantifiers are not charged: an
expression has at most 500 of them.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are any JSON.

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple, cast

from tailrace.watch.cel import (
    DOC,
    REQUEST,
    Call,
    Const,
    Ident,
    ListLiteral,
    MapLiteral,
    Node,
    Quantified,
    Select,
    children,
    field_path,
)

STEPS_MAX: Final = 10_000  # per document; about 5 ms
TEXT_SHIFT: Final = 10  # 1,024 characters per step

# CPython searches short texts in time proportional to the product of both lengths, long ones linearly.
_SEARCH_SHIFT: Final = 9
_SHORT_TEXT: Final = 2_500
_SHORT_PATTERN, _MIDDLE_TEXT = 100, 30_000
_PRODUCT_SHIFT: Final = 13
# The library does so for all lengths: steps per kibibyte, and pattern bytes for one more.
_LIBRARY_SEARCH: Final = 8
_LIBRARY_PATTERN_BYTES: Final = 16


class CostExceededError(Exception):
    """The expression exceeds its steps; whether it matches is unknown."""


class EvaluationPostponedError(Exception):
    """The expression exceeds the steps left in this time slice; it may be evaluated later."""


class StepMeter(threading.local):
    """The steps of the current evaluation, per thread."""

    allowance = STEPS_MAX  # per evaluation
    left = STEPS_MAX
    spent = 0  # in all evaluations

    def reset(self) -> None:
        self.left = self.allowance

    def charge(self, steps: int) -> None:
        """Call before the work: raises if the steps are not left."""
        if steps > self.left:
            raise CostExceededError if self.allowance == STEPS_MAX else EvaluationPostponedError
        self.left -= steps
        self.spent += steps


class StepBudget:
    """The steps of all evaluations in one iteration of the event loop.

    Once they are used up, every expression still has a small share, so that cheap ones are decided.
    """

    __slots__ = ("_steps", "left")

    SHARE: Final = 100

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.left = steps

    @property
    def is_used(self) -> bool:
        return self.left < self._steps

    def refill(self) -> None:
        self.left = self._steps

    def begin(self) -> int:
        """Set the allowance of the next evaluations on this thread; returns the steps spent so far."""
        METER.allowance = STEPS_MAX if self.left >= STEPS_MAX else max(self.SHARE, self.left)
        return METER.spent

    def end(self, spent_before: int) -> None:
        METER.allowance = STEPS_MAX
        self.left -= METER.spent - spent_before


METER: Final = StepMeter()
charge: Final = METER.charge


def search_steps(text: int, pattern: int) -> int:
    """The steps of searching a pattern in a text, by their lengths."""
    steps = (text + pattern) >> _SEARCH_SHIFT
    if text < _SHORT_TEXT or (pattern < _SHORT_PATTERN and text < _MIDDLE_TEXT):
        steps += (text * pattern) >> _PRODUCT_SHIFT
    return steps


def value_weight(value: Any) -> int:
    """The steps to visit all of a value: a scalar or short string costs nothing.

    Stops at values that exceed any budget.
    """
    steps = 0
    pending: list[Any] = [value]
    while pending and steps <= STEPS_MAX:
        one = pending.pop()
        kind: type[Any] = type(one)
        if kind is str:
            steps += len(one) >> TEXT_SHIFT
        elif kind is list or kind is dict:
            steps += len(one)
            if steps <= STEPS_MAX:
                pending.extend(one)
                if kind is dict:
                    pending.extend(one.values())
    return steps


class _NodeBound(NamedTuple):
    """Upper bounds of a node: the weight of its value, and the steps to compute it."""

    weight: int
    steps: int


class LibraryCostBound:
    """An upper bound of the steps of the CEL library for an expression."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._fields = _document_fields(node)

    def charge(self, document: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Charge the bound; returns the fields of the document that the expression uses.

        The library converts the whole document that it is given.
        """
        seen = document
        if self._fields is not None:
            seen = {name: document[name] for name in self._fields if name in document}
        converted = value_weight(seen)
        charge(converted)
        bounds = _NodeBounds(seen, converted, value_weight(variables.get(REQUEST)))
        charge(bounds.bound_of(self._node, 0).steps)
        return seen


def _document_fields(node: Node) -> frozenset[str] | None:
    """The top-level fields that an expression uses; None if it may use all."""
    if isinstance(node, Ident):
        return None if node.name == DOC else frozenset()
    path = field_path(Select(node.operand, node.field) if isinstance(node, Select) else node)
    if path is not None:
        return frozenset(path[:1])
    found: set[str] = set()
    for child in children(node):
        below = _document_fields(child)
        if below is None:
            return None
        found |= below
    return frozenset(found)


class _NodeBounds:
    """The bounds of all nodes of an expression, on one document."""

    def __init__(self, document: dict[str, Any], document_weight: int, request_weight: int) -> None:
        self._document = document
        self._document_weight = document_weight
        self._request_weight = request_weight

    def bound_of(self, node: Node, element: int) -> _NodeBound:
        """`element` is the weight of the heaviest element of the enclosing quantifier."""
        if isinstance(node, Const):
            return _NodeBound(value_weight(node.value), 1)
        if isinstance(node, Ident):
            known = {DOC: self._document_weight, REQUEST: self._request_weight}
            return _NodeBound(known.get(node.name, element), 1)
        if isinstance(node, Select) and node.test:
            return _NodeBound(0, 1 + self.bound_of(node.operand, element).steps)
        path = field_path(node)
        if path is not None:
            return _NodeBound(value_weight(self._at(path)), len(path))
        if isinstance(node, Select):
            operand = self.bound_of(node.operand, element)
            return _NodeBound(operand.weight, operand.steps + 1)
        if isinstance(node, Quantified):
            return self._quantified(node)
        parts = [self.bound_of(child, element) for child in children(node)]
        heavy, steps = sum(part.weight for part in parts), 1 + sum(part.steps for part in parts)
        if isinstance(node, ListLiteral | MapLiteral):
            return _NodeBound(len(parts) + heavy, steps + heavy)
        if node.function == "contains" and len(parts) == 2:
            return _NodeBound(
                0, steps + heavy + _library_search_steps(parts[0].weight, node.args[1], parts[1].weight)
            )
        return _NodeBound(_call_weight(node, parts, heavy), steps + heavy)

    def _quantified(self, node: Quantified) -> _NodeBound:
        within = self.bound_of(node.range, 0)
        path = field_path(node.range)
        found = None if path is None else self._at(path)
        if type(found) is list or type(found) is dict:
            count, element = len(found), max(map(value_weight, found), default=0)
        else:
            count = element = within.weight
        return _NodeBound(0, within.steps + count * (1 + self.bound_of(node.condition, element).steps))

    def _at(self, path: tuple[str, ...]) -> Any:
        value: Any = self._document
        for name in path:
            value = cast("dict[str, Any]", value).get(name) if type(value) is dict else None
        return value


def _call_weight(node: Call, parts: list[_NodeBound], heavy: int) -> int:
    """The maximum weight of a call's value; only some calls return their arguments."""
    if node.function in ("_+_", "string"):
        return heavy
    if node.function in ("_?_:_", "_[_]"):
        return max(part.weight for part in parts)
    return 0


def _library_search_steps(text: int, pattern: Node, pattern_weight: int) -> int:
    known = pattern.value if isinstance(pattern, Const) else None
    length = len(known) if type(known) is str else (1 + pattern_weight) << TEXT_SHIFT
    return (1 + text) * (_LIBRARY_SEARCH + length // _LIBRARY_PATTERN_BYTES)
