"""A predicate: an expression ready to be decided on documents, and what an index can use of it."""

# pyright: reportUnknownVariableType=false
# Values are whatever JSON holds.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from tailrace.watch.cel import Program
from tailrace.watch.lower import NotLoweredError, Truth, conjunction, guards, truth
from tailrace.watch.syntax import Call, Const, Node, Select, both, constant, flatten, path_of, text
from tailrace.watch.values import CostError, EvaluationError

# Moves when the meaning of expressions does; part of every hash of a query.
SEMANTICS: Final = "1"
IN_MAX: Final = 64  # longer lists are not filed under each of their values
BRANCHES_MAX: Final = 8

ConditionKind = Literal["equal", "among", "range", "prefix", "contains", "has"]
Path = tuple[str, ...]
_BELOW: Final = float("-inf")
_ABOVE: Final = float("inf")


class Range(NamedTuple):
    """Numbers from `low` to `high`, as doubles; whether the ends belong to it is left to the exact stage."""

    low: float
    high: float


class Condition(NamedTuple):
    """A conjunct in a form that an index can look up: it is false, or an error, wherever it is not found."""

    kind: ConditionKind
    path: Path
    value: Any = None


def class_of(value: Any) -> Any:
    """Equal values of the language have equal classes, and can be keys of a dictionary."""
    kind: type[Any] = type(value)
    if kind is bool:
        return ("b", value)
    if kind is int:
        return float(value)
    if kind is list or kind is dict:
        return None  # not looked up by value
    if value is None:
        return ("n",)
    return value


def conditions_of(node: Node) -> list[Condition]:
    """What every matching document satisfies, as far as an index understands it."""
    found: list[Condition] = []
    ranges: dict[Path, Range] = {}
    for part in flatten(node, "_&&_"):
        condition = _condition(part)
        if condition is None:
            continue
        if condition.kind == "range":
            known = ranges.get(condition.path, Range(_BELOW, _ABOVE))
            ranges[condition.path] = Range(
                max(known.low, condition.value.low), min(known.high, condition.value.high)
            )
        else:
            found.append(condition)
    return found + [Condition("range", path, value) for path, value in ranges.items()]


def _condition(node: Node) -> Condition | None:
    if isinstance(node, Select):
        path = path_of(Select(node.operand, node.field))
        if path is None:
            return None
        return Condition("has", path) if node.test else Condition("equal", path, ("b", True))
    if not isinstance(node, Call):
        return None
    if node.function == "!_":
        path = path_of(node.args[0])
        return None if path is None else Condition("equal", path, ("b", False))
    if len(node.args) != 2:
        return None
    function, (left, right) = node.function, node.args
    if function in _SWAPPED and isinstance(left, Const):
        function, left, right = _SWAPPED[function], right, left
    path, literal = path_of(left), constant(right)
    if path is not None and literal is not None and literal.kind == "json":
        return _of_field(function, path, literal.value)
    path, literal = path_of(right), constant(left)
    if function == "@in" and path is not None and literal is not None and literal.kind == "json":
        element = class_of(literal.value)
        return None if element is None else Condition("contains", path, element)
    return None


_SWAPPED: Final = {"_==_": "_==_", "_<_": "_>_", "_<=_": "_>=_", "_>_": "_<_", "_>=_": "_<=_"}


def _of_field(function: str, path: Path, value: Any) -> Condition | None:
    kind: type[Any] = type(value)
    if function == "_==_":
        wanted = class_of(value)
        return Condition("has", path) if wanted is None else Condition("equal", path, wanted)
    if function in ("_<_", "_<=_", "_>_", "_>=_"):
        if kind is not int and kind is not float:
            return Condition("has", path)
        upper = function in ("_<_", "_<=_")
        return Condition("range", path, Range(_BELOW, float(value)) if upper else Range(float(value), _ABOVE))
    if function == "@in" and kind is list:
        classes = [class_of(item) for item in value]
        if len(classes) > IN_MAX or None in classes:
            return Condition("has", path)
        return Condition("among", path, tuple(dict.fromkeys(classes)))
    if function == "startsWith" and kind is str:
        return Condition("prefix", path, value) if value else Condition("has", path)
    if function in ("endsWith", "contains", "_!=_"):
        return Condition("has", path)
    return None


class Part(NamedTuple):
    """A piece of a predicate, with the library's program if it came as text."""

    node: Node
    program: Program | None = None
    variables: dict[str, Any] | None = None  # beside the document


class Predicate:
    """All parts have to be true. Two with the same hash decide the same."""

    __slots__ = ("branches", "fallback", "hash", "matches", "text")

    def __init__(self, parts: Sequence[Part], documents: frozenset[str] | None = None) -> None:
        nodes = [part.node for part in parts]
        conjuncts = sorted({text(piece) for node in nodes for piece in flatten(node, "_&&_")})
        named = "" if documents is None else f"documents{sorted(documents)}"
        self.text = f"{named}{' && '.join(conjuncts)}"
        self.hash = hashlib.sha256(f"{SEMANTICS}\n{self.text}".encode("utf-8", "surrogatepass")).digest()
        self.fallback = False
        truths: list[Truth] = []
        if documents is not None:
            truths.append(lambda doc: doc["id"] in documents)
        for part in parts:
            try:
                holds = truth(part.node)
            except NotLoweredError:
                self.fallback = True
                holds = _by_library(part)
            truths.append(holds if part.variables is None else _denying(holds))
        self.matches: Truth = conjunction(truths)
        self.branches = self._branches(nodes, documents)

    def _branches(self, nodes: list[Node], documents: frozenset[str] | None) -> list[list[Condition]]:
        """What the index files it under: one list of conjuncts, or one for each branch of an OR."""
        conditions = conditions_of(both(nodes))
        if documents is not None:
            conditions.append(Condition("among", ("id",), tuple(sorted(documents))))
        if conditions:
            return [conditions]
        for node in nodes:
            for part in flatten(node, "_&&_"):
                branches = [conditions_of(branch) for branch in flatten(part, "_||_")]
                if 1 < len(branches) <= BRANCHES_MAX and all(branches):
                    return branches
        return []


def _denying(holds: Truth) -> Truth:
    """A rule that takes too many steps says no; a query that does has no result at all."""

    def allows(doc: Any) -> bool:
        try:
            return holds(doc)
        except CostError:
            return False

    return allows


def _by_library(part: Part) -> Truth:
    program, variables, checks = part.program, part.variables or {}, guards(part.node)
    assert program is not None, "what cannot be lowered came as text"

    def holds(doc: Any) -> bool:
        for check in checks:
            try:
                check(doc, None)
            except EvaluationError:
                continue  # which the library finds, too
        return program.holds(doc=doc, **variables)

    return holds
