"""A predicate: an expression ready to be decided on documents, and what an index can use of it.

Conjuncts that compare a field with a value are kept as values and not as closures: they are decided from
what the index knows of them anyway, which is what lets a subscription be small.
"""

# pyright: reportUnknownVariableType=false
# Values are whatever JSON holds.

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from tailrace.watch.cel import (
    Call,
    CelProgram,
    Const,
    Node,
    Select,
    as_constant,
    canonical_text,
    field_path,
    flatten_operands,
)
from tailrace.watch.evaluation_cost import METER, CostExceededError, LibraryCostBound
from tailrace.watch.evaluator import (
    MISSING,
    NotCompilableError,
    TruthFunction,
    compile_conjunction,
    compile_truth,
    field_getter,
    is_metered,
)

# Moves when the meaning of expressions does; part of every hash of a query.
SEMANTICS: Final = "1"
IN_MAX: Final = 64  # longer lists are not filed under each of their values
BRANCHES_MAX: Final = 8
# Below it, doubles and integers compare alike, however they are compared.
EXACT_BELOW: Final = 2**53

ConditionKind = Literal["equal", "among", "range", "prefix", "contains", "has"]
FieldPath = tuple[str, ...]
UNDECIDED: Final = -1
EITHER: Final = -2
# Both are looked up in one table.
LOOKUP_TABLES: Final = {"among": "equal"}
_BELOW: Final = float("-inf")
_ABOVE: Final = float("inf")
WITHOUT_LOW, WITHOUT_HIGH = 1, 2


class Range(NamedTuple):
    """Numbers from `low` to `high`, as doubles; `ends` says which of the two do not belong to it."""

    low: float
    high: float
    ends: int = 0

    @property
    def closed(self) -> tuple[float, float]:
        """The least and the greatest double that belong to it."""
        low, high, ends = self
        return (
            math.nextafter(low, math.inf) if ends & WITHOUT_LOW else low,
            math.nextafter(high, -math.inf) if ends & WITHOUT_HIGH else high,
        )


class Condition(NamedTuple):
    """A conjunct in a form that an index can look up: it is false, or an error, wherever it is not found.

    One that is `exact` is true wherever it is found, and stands for its conjunct altogether.
    """

    kind: ConditionKind
    path: FieldPath
    value: Any = None
    exact: bool = False


def equality_class(value: Any) -> Any:
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


@lru_cache(4096)
def _intern_path(path: FieldPath) -> FieldPath:
    """One for all who name the field."""
    return tuple(map(sys.intern, path))


@lru_cache(4096)
def _intern_condition(condition: Condition) -> Condition:
    """Many ask for the same."""
    return condition


def extract_conditions(node: Node) -> tuple[Condition, ...]:
    """What every matching document satisfies, as far as an index understands it."""
    return _merge_conditions(_split_conjuncts(node)[0])


def _split_conjuncts(node: Node) -> tuple[list[Condition], list[Node]]:
    """The conditions of an expression, and those of its conjuncts that they do not decide."""
    conditions: list[Condition] = []
    rest: list[Node] = []
    for part in flatten_operands(node, "_&&_"):
        condition = _condition(part)
        if condition is not None:
            conditions.append(condition)
        if condition is None or not condition.exact:
            rest.append(part)
    return conditions, rest


def _merge_conditions(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """Each once, and one range for each field."""
    found: dict[Condition, None] = {}
    ranges: dict[FieldPath, Range] = {}
    for condition in conditions:
        if condition.kind == "range" and condition.exact:
            known = ranges.get(condition.path)
            ranges[condition.path] = (
                condition.value if known is None else _intersect_ranges(known, condition.value)
            )
        else:
            found[_intern_condition(condition)] = None
    return (
        *found,
        *(_intern_condition(Condition("range", path, value, exact=True)) for path, value in ranges.items()),
    )


def _intersect_ranges(one: Range, other: Range) -> Range:
    """What is in both of two ranges."""
    low, high = max(one.low, other.low), min(one.high, other.high)
    ends = 0
    for given in (one, other):
        ends |= given.ends & WITHOUT_LOW if given.low == low else 0
        ends |= given.ends & WITHOUT_HIGH if given.high == high else 0
    return Range(low, high, ends)


def _condition(node: Node) -> Condition | None:
    if isinstance(node, Select):
        path = field_path(Select(node.operand, node.field))
        if path is None:
            return None
        path = _intern_path(path)
        if node.test:
            return Condition("has", path, exact=True)
        return Condition("equal", path, ("b", True), exact=True)
    if not isinstance(node, Call):
        return None
    if node.function == "!_":
        path = field_path(node.args[0])
        return None if path is None else Condition("equal", _intern_path(path), ("b", False), exact=True)
    if len(node.args) != 2:
        return None
    function, (left, right) = node.function, node.args
    if function in _SWAPPED and isinstance(left, Const):
        function, left, right = _SWAPPED[function], right, left
    path, literal = field_path(left), as_constant(right)
    if path is not None and literal is not None and literal.kind == "json":
        return _field_condition(function, _intern_path(path), literal.value)
    path, literal = field_path(right), as_constant(left)
    if function == "@in" and path is not None and literal is not None and literal.kind == "json":
        element = equality_class(literal.value)
        return None if element is None else Condition("contains", _intern_path(path), element)
    return None


_SWAPPED: Final = {"_==_": "_==_", "_<_": "_>_", "_<=_": "_>=_", "_>_": "_<_", "_>=_": "_<=_"}
_UPPER: Final = frozenset(("_<_", "_<=_"))
_ENDS: Final = {"_<_": WITHOUT_HIGH, "_<=_": 0, "_>_": WITHOUT_LOW, "_>=_": 0}


def _field_condition(function: str, path: FieldPath, value: Any) -> Condition | None:
    kind: type[Any] = type(value)
    is_number = kind is int or kind is float
    exact = not is_number or abs(value) < EXACT_BELOW
    if function == "_==_":
        wanted = equality_class(value)
        return Condition("has", path) if wanted is None else Condition("equal", path, wanted, exact)
    if function in _ENDS:
        if not is_number:
            return Condition("has", path)
        bound, ends = float(value), _ENDS[function]
        between = Range(_BELOW, bound, ends) if function in _UPPER else Range(bound, _ABOVE, ends)
        return Condition("range", path, between, exact)
    if function == "@in" and kind is list:
        classes = [equality_class(item) for item in value]
        if len(classes) > IN_MAX or None in classes:
            return Condition("has", path)
        texts = all(type(item) is str for item in value)
        return Condition("among", path, tuple(dict.fromkeys(classes)), exact=texts)
    if function == "startsWith" and kind is str:
        return Condition("prefix", path, value, exact=True) if value else Condition("has", path)
    if function in ("endsWith", "contains", "_!=_"):
        return Condition("has", path)
    return None


def condition_holds(condition: Condition, doc: Any) -> bool:
    """Whether an exact condition is true on a document."""
    kind, path, wanted, _ = condition
    found = doc.get(path[0], MISSING) if len(path) == 1 else field_getter(path)(doc)
    is_a = type(found)
    if kind == "equal":
        if type(wanted) is str:
            return found == wanted
        if type(wanted) is float:
            return (is_a is int or is_a is float) and found == wanted
        return found is (wanted[1] if len(wanted) == 2 else None)
    if kind == "range":
        low, high, ends = wanted
        if (is_a is not int and is_a is not float) or not low <= found <= high:
            return False
        return not (
            ends and ((ends & WITHOUT_LOW and found == low) or (ends & WITHOUT_HIGH and found == high))
        )
    if kind == "among":
        return is_a is str and found in wanted
    if kind == "prefix":
        return is_a is str and found.startswith(wanted)
    return found is not MISSING


class PredicatePart(NamedTuple):
    """A piece of a predicate, with the library's program if it came as text."""

    node: Node
    program: CelProgram | None = None
    variables: dict[str, Any] | None = None  # beside the document


def canonical_predicate(parts: Sequence[PredicatePart], documents: frozenset[str] | None = None) -> str:
    """Texts that are equal mean the same on every document."""
    conjuncts = sorted(
        {canonical_text(piece) for part in parts for piece in flatten_operands(part.node, "_&&_")}
    )
    named = "" if documents is None else f"documents{sorted(documents)}"
    return f"{named}{' && '.join(conjuncts)}"


class Predicate:
    """All parts have to be true. Two with the same hash decide the same."""

    __slots__ = ("_rest", "_tests", "branches", "fallback", "hash", "is_metered", "lookups")

    def __init__(self, parts: Sequence[PredicatePart], documents: frozenset[str] | None = None) -> None:
        meaning = f"{SEMANTICS}\n{canonical_predicate(parts, documents)}"
        self.hash = hashlib.sha256(meaning.encode("utf-8", "surrogatepass")).digest()
        self.fallback = False
        self.is_metered = False  # whether deciding it may charge anything
        conditions: list[Condition] = []
        truths: list[TruthFunction] = []
        for part in parts:
            taken, rest = _split_conjuncts(part.node)
            conditions += taken
            truths += self._truths(part, rest)
        if documents is not None:
            conditions.append(Condition("among", ("id",), tuple(sorted(documents)), exact=True))
        known = _merge_conditions(conditions)
        exact = tuple(one for one in known if one.exact)
        self._tests: tuple[Condition, ...] = known if len(exact) == len(known) else exact
        rest = compile_conjunction(truths) if truths else None
        self._rest: TruthFunction | None = (
            _with_step_budget(rest) if rest is not None and self.is_metered else rest
        )
        # What the index files it under: one list of conjuncts, or one for each branch of an OR.
        self.branches: tuple[tuple[Condition, ...], ...] = (known,) if known else _branches(parts)
        # It is true where so many of its conjuncts were looked up: there is nothing else to decide.
        # One that is `EITHER` is true wherever it is found at all.
        self.lookups = _lookups(known) if self.is_plain or not parts else UNDECIDED
        if len(self.branches) > 1 and _is_disjunction(parts):
            self.lookups = EITHER

    def _truths(self, part: PredicatePart, rest: list[Node]) -> list[TruthFunction]:
        """What is left to decide of a part, if anything is."""
        try:
            found = [compile_truth(node) for node in rest]
        except NotCompilableError:
            self.fallback = self.is_metered = True
            found = [_library_truth(part)]
        self.is_metered = self.is_metered or any(map(is_metered, rest))
        return found if part.variables is None else [_deny_on_cost(holds) for holds in found]

    @property
    def is_plain(self) -> bool:
        """Whether its conditions say all of it."""
        return self._rest is None and len(self.branches) == 1

    def matches(self, doc: Any) -> bool:
        # Equalities come first, and what is decided was mostly found by one: the others say no sooner.
        for condition in reversed(self._tests):
            if not condition_holds(condition, doc):
                return False
        rest = self._rest
        return rest is None or rest(doc)


def _lookups(conditions: Sequence[Condition]) -> int:
    """How often an index looks for these, if it looks for each of them."""
    places = {(LOOKUP_TABLES.get(one.kind, one.kind), one.path) for one in conditions}
    return len(conditions) if len(places) == len(conditions) else UNDECIDED


def _is_disjunction(parts: Sequence[PredicatePart]) -> bool:
    """Whether it says that one of several comparisons holds, each of which a look-up decides, and no more."""
    if len(parts) != 1 or parts[0].variables is not None or len(flatten_operands(parts[0].node, "_&&_")) != 1:
        return False
    for branch in flatten_operands(parts[0].node, "_||_"):
        taken, rest = _split_conjuncts(branch)
        if rest or len(_merge_conditions(taken)) != 1:
            return False
    return True


def _branches(parts: Sequence[PredicatePart]) -> tuple[tuple[Condition, ...], ...]:
    for part in parts:
        for piece in flatten_operands(part.node, "_&&_"):
            branches = tuple(extract_conditions(branch) for branch in flatten_operands(piece, "_||_"))
            if 1 < len(branches) <= BRANCHES_MAX and all(branches):
                return branches
    return ()


def _deny_on_cost(holds: TruthFunction) -> TruthFunction:
    """A rule that takes too many steps says no; a query that does has no result at all.

    A rule has a budget of its own: what may be read does not depend on what else is asked for.
    """

    def allows(doc: Any) -> bool:
        left = METER.left
        METER.begin()
        try:
            return holds(doc)
        except CostExceededError:
            return False
        finally:
            METER.left = left

    return allows


def _library_truth(part: PredicatePart) -> TruthFunction:
    program, variables, cost = part.program, part.variables or {}, LibraryCostBound(part.node)
    assert program is not None, "what cannot be lowered came as text"
    return lambda doc: program.holds(doc=cost.charge(doc, variables), **variables)


def _with_step_budget(holds: TruthFunction) -> TruthFunction:
    """With a budget for this evaluation alone."""

    def decided(doc: Any) -> bool:
        METER.begin()
        return holds(doc)

    return decided
