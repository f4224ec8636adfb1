"""Predicates: compiled expressions, and the conditions by which an index can find them.

Conjuncts that compare a field with a constant are stored as values (`Condition`), not as closures: the index
needs them anyway, and subscriptions stay small. Everything else is compiled to a truth function.
"""

# pyright: reportUnknownVariableType=false
# Values are any JSON.

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

# Changes when the semantics of expressions change; part of every query hash.
SEMANTICS: Final = "1"
IN_MAX: Final = 64  # longer lists are not indexed by their values
BRANCHES_MAX: Final = 8
# Below it, doubles and integers compare exactly.
EXACT_BELOW: Final = 2**53

ConditionKind = Literal["equal", "among", "range", "prefix", "contains", "has"]
FieldPath = tuple[str, ...]
UNDECIDED: Final = -1
EITHER: Final = -2
# Both kinds are looked up in the same table.
LOOKUP_TABLES: Final = {"among": "equal"}
_BELOW: Final = float("-inf")
_ABOVE: Final = float("inf")
WITHOUT_LOW, WITHOUT_HIGH = 1, 2


class Range(NamedTuple):
    """Doubles from `low` to `high`; `ends` says which of the two are excluded."""

    low: float
    high: float
    ends: int = 0

    @property
    def closed(self) -> tuple[float, float]:
        """The smallest and the greatest double in the range."""
        low, high, ends = self
        return (
            math.nextafter(low, math.inf) if ends & WITHOUT_LOW else low,
            math.nextafter(high, -math.inf) if ends & WITHOUT_HIGH else high,
        )


class Condition(NamedTuple):
    """A conjunct that an index can look up: where the lookup finds nothing, the conjunct is not true.

    If `exact`, it is true wherever it is found, and replaces its conjunct.
    """

    kind: ConditionKind
    path: FieldPath
    value: Any = None
    exact: bool = False


def equality_class(value: Any) -> Any:
    """A hashable key: values that CEL considers equal have equal classes."""
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
    """One shared tuple per field."""
    return tuple(map(sys.intern, path))


@lru_cache(4096)
def _intern_condition(condition: Condition) -> Condition:
    """One shared object per condition."""
    return condition


def extract_conditions(node: Node) -> tuple[Condition, ...]:
    """Conditions that every matching document satisfies."""
    return _merge_conditions(_split_conjuncts(node)[0])


def _split_conjuncts(node: Node) -> tuple[list[Condition], list[Node]]:
    """The conditions of an expression, and the conjuncts that they do not decide."""
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
    """Without duplicates, and with one range per field."""
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
    low, high = max(one.low, other.low), min(one.high, other.high)
    ends = 0
    for part in (one, other):
        ends |= part.ends & WITHOUT_LOW if part.low == low else 0
        ends |= part.ends & WITHOUT_HIGH if part.high == high else 0
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
        expected = equality_class(value)
        return Condition("has", path) if expected is None else Condition("equal", path, expected, exact)
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
    kind, path, expected, _ = condition
    found = doc.get(path[0], MISSING) if len(path) == 1 else field_getter(path)(doc)
    is_a = type(found)
    if kind == "equal":
        if type(expected) is str:
            return found == expected
        if type(expected) is float:
            return (is_a is int or is_a is float) and found == expected
        return found is (expected[1] if len(expected) == 2 else None)
    if kind == "range":
        low, high, ends = expected
        if (is_a is not int and is_a is not float) or not low <= found <= high:
            return False
        return not (
            ends and ((ends & WITHOUT_LOW and found == low) or (ends & WITHOUT_HIGH and found == high))
        )
    if kind == "among":
        return is_a is str and found in expected
    if kind == "prefix":
        return is_a is str and found.startswith(expected)
    return found is not MISSING


class PredicatePart(NamedTuple):
    """A part of a predicate, with the CEL program if it was given as source text."""

    node: Node
    program: CelProgram | None = None
    variables: dict[str, Any] | None = None  # besides the document


def canonical_predicate(parts: Sequence[PredicatePart], documents: frozenset[str] | None = None) -> str:
    """A canonical text: equal texts give the same result on every document."""
    conjuncts = sorted(
        {canonical_text(piece) for part in parts for piece in flatten_operands(part.node, "_&&_")}
    )
    named = "" if documents is None else f"documents{sorted(documents)}"
    return f"{named}{' && '.join(conjuncts)}"


class Predicate:
    """The conjunction of its parts. Predicates with equal hashes are equivalent."""

    __slots__ = ("_rest", "_tests", "branches", "fallback", "hash", "is_metered", "lookups")

    def __init__(self, parts: Sequence[PredicatePart], documents: frozenset[str] | None = None) -> None:
        meaning = f"{SEMANTICS}\n{canonical_predicate(parts, documents)}"
        self.hash = hashlib.sha256(meaning.encode("utf-8", "surrogatepass")).digest()
        self.fallback = False
        self.is_metered = False  # whether evaluation is charged to the step meter
        conditions: list[Condition] = []
        truths: list[TruthFunction] = []
        for part in parts:
            found, rest = _split_conjuncts(part.node)
            conditions += found
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
        # The keys in the index: one list of conjuncts, or one per branch of an OR.
        self.branches: tuple[tuple[Condition, ...], ...] = (known,) if known else _branches(parts)
        # It is true where this many of its conjuncts were found: no evaluation is needed.
        # With `EITHER`, it is true wherever any of them is found.
        self.lookups = _lookups(known) if self.is_plain or not parts else UNDECIDED
        if len(self.branches) > 1 and _is_disjunction(parts):
            self.lookups = EITHER

    def _truths(self, part: PredicatePart, rest: list[Node]) -> list[TruthFunction]:
        """The truth functions of the conjuncts that conditions do not decide."""
        try:
            found = [compile_truth(node) for node in rest]
        except NotCompilableError:
            self.fallback = self.is_metered = True
            found = [_library_truth(part)]
        self.is_metered = self.is_metered or any(map(is_metered, rest))
        return found if part.variables is None else [_deny_on_cost(holds) for holds in found]

    @property
    def is_plain(self) -> bool:
        """Whether its conditions decide it completely."""
        return self._rest is None and len(self.branches) == 1

    def matches(self, doc: Any) -> bool:
        # Equalities come first, and candidates were mostly found by one: the others fail sooner.
        for condition in reversed(self._tests):
            if not condition_holds(condition, doc):
                return False
        rest = self._rest
        return rest is None or rest(doc)


def _lookups(conditions: Sequence[Condition]) -> int:
    """How many index lookups decide these conditions; `UNDECIDED` if two share a table and field."""
    indexes = {(LOOKUP_TABLES.get(one.kind, one.kind), one.path) for one in conditions}
    return len(conditions) if len(indexes) == len(conditions) else UNDECIDED


def _is_disjunction(parts: Sequence[PredicatePart]) -> bool:
    """Whether it is exactly an OR of comparisons that a lookup decides."""
    if len(parts) != 1 or parts[0].variables is not None or len(flatten_operands(parts[0].node, "_&&_")) != 1:
        return False
    for branch in flatten_operands(parts[0].node, "_||_"):
        found, rest = _split_conjuncts(branch)
        if rest or len(_merge_conditions(found)) != 1:
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
    """A rule that exceeds its steps denies; a query that does fails.

    A rule has its own budget: what may be read must not depend on the query.
    """

    def allows(doc: Any) -> bool:
        left = METER.left
        METER.reset()
        try:
            return holds(doc)
        except CostExceededError:
            return False
        finally:
            METER.left = left

    return allows


def _library_truth(part: PredicatePart) -> TruthFunction:
    program, variables, cost = part.program, part.variables or {}, LibraryCostBound(part.node)
    assert program is not None, "a part that cannot be compiled has a program"
    return lambda doc: program.holds(doc=cost.charge(doc, variables), **variables)


def _with_step_budget(holds: TruthFunction) -> TruthFunction:
    """Reset the step meter before each evaluation."""

    def decided(doc: Any) -> bool:
        METER.reset()
        return holds(doc)

    return decided
