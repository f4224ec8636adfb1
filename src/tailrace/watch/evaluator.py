"""Expressions compiled to closures, with CEL semantics for equality, order and arithmetic.

`compile_truth` decides whether a document matches, `compile_value` computes a value. A closure takes the flat
document and the current element of a quantifier. An error is an exception inside a value function and false
in a truth function: a document matches only if the expression is true.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, cast

from tailrace.watch.cel import (
    DOC,
    FLIPPED_COMPARISONS,
    Call,
    Const,
    Ident,
    ListLiteral,
    MapLiteral,
    Node,
    Quantified,
    Select,
    as_constant,
    children,
    field_path,
    flatten_operands,
)
from tailrace.watch.evaluation_cost import TEXT_SHIFT, charge, search_steps

# pyright: reportUnknownVariableType=false
# Values are any JSON.


INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1


class EvaluationError(Exception):
    """The expression has no value on this document, which therefore does not match."""


def cel_equal(one: Any, other: Any) -> bool:
    """`==`: false across types, numbers by value, lists and maps element by element."""
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
    """The comparison ends with the shorter string."""
    steps = min(len(one), len(other)) >> TEXT_SHIFT
    if steps:
        charge(steps)


def comparable_pair(one: Any, other: Any) -> tuple[Any, Any]:
    """Two ordered values in a form that Python compares like CEL; raises otherwise."""
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
    """Integer division truncates; doubles follow IEEE 754."""
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


# pyright: reportUnknownVariableType=false
# Values are any JSON.


ValueFunction = Callable[[Any, Any], Any]
TruthFunction = Callable[[Any], bool]

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "_<_": operator.lt,
    "_<=_": operator.le,
    "_>_": operator.gt,
    "_>=_": operator.ge,
}
_ARITHMETIC: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "_+_": cel_add,
    "_-_": cel_subtract,
    "_*_": cel_multiply,
    "_/_": cel_divide,
    "_%_": cel_modulo,
}
_TEXT: Final[dict[str, Callable[[str, str], bool]]] = {
    "contains": operator.contains,
    "startsWith": str.startswith,
    "endsWith": str.endswith,
}
_SHORT: Final = 1 << TEXT_SHIFT
_MISSING: Final = object()


class NotCompilableError(Exception):
    """Only the library can evaluate this: conversions, map literals, unsigned integers."""


def compile_truth(node: Node) -> TruthFunction:
    """A function that decides whether the node is true on a document."""
    if isinstance(node, Const):
        holds = node.value is True
        return lambda _: holds
    if isinstance(node, Call):
        if node.function == "_&&_":
            return compile_conjunction([compile_truth(part) for part in flatten_operands(node, "_&&_")])
        if node.function == "_||_":
            return _compile_disjunction([compile_truth(part) for part in flatten_operands(node, "_||_")])
        special = _comparison_truth(node)
        if special is not None:
            return special
    evaluate = compile_value(node)

    def holds_on(doc: Any) -> bool:
        try:
            return evaluate(doc, None) is True
        except EvaluationError:
            return False

    return holds_on


def compile_conjunction(parts: list[TruthFunction]) -> TruthFunction:
    """The conjunction; unrolled for common sizes, since it runs for every candidate."""
    if not parts:
        return lambda _: True
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        first, second = parts
        return lambda doc: first(doc) and second(doc)
    if len(parts) == 3:
        one, two, three = parts
        return lambda doc: one(doc) and two(doc) and three(doc)
    begin, rest = compile_conjunction(parts[:3]), compile_conjunction(parts[3:])
    return lambda doc: begin(doc) and rest(doc)


def _compile_disjunction(parts: list[TruthFunction]) -> TruthFunction:
    if len(parts) == 2:
        first, second = parts
        return lambda doc: first(doc) or second(doc)
    return lambda doc: any(part(doc) for part in parts)


@lru_cache(4096)
def field_getter(path: tuple[str, ...]) -> Callable[[Any], Any]:
    """A cached getter of a field; returns `MISSING` if it does not exist."""
    if len(path) == 1:
        name = path[0]
        return lambda doc: doc.get(name, _MISSING)

    def get(doc: Any) -> Any:
        for name in path:
            if type(doc) is not dict:
                return _MISSING
            doc = cast("dict[str, Any]", doc).get(name, _MISSING)
        return doc

    return get


MISSING: Final = _MISSING


def _comparison_truth(node: Call) -> TruthFunction | None:
    """A specialized function for `doc.field OP constant`."""
    function, args = node.function, node.args
    if function in FLIPPED_COMPARISONS and isinstance(args[0], Const):
        function, args = FLIPPED_COMPARISONS[function], (args[1], args[0])
    if len(args) != 2:
        return None
    path, literal = field_path(args[0]), as_constant(args[1])
    if path is None or literal is None or literal.kind != "json":
        return None
    get = field_getter(path)
    expected: Any = literal.value
    if function == "_==_":
        if type(expected) is str and len(path) == 1:
            name = path[0]
            return lambda doc: doc.get(name) == expected  # a missing field is None, which is not a string
        return _equality(get, expected)
    if function in _COMPARE and type(expected) in (int, float, str):
        return _ordering(get, expected, _COMPARE[function])
    if function == "@in" and _is_text_list(expected):
        among: frozenset[str] = frozenset(expected)

        def is_among(doc: Any) -> bool:
            found = get(doc)
            return type(found) is str and found in among

        return is_among
    if function == "startsWith" and type(expected) is str:
        return lambda doc: type(found := get(doc)) is str and found.startswith(expected)
    return None


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is str for item in cast("list[Any]", value))


def _equality(get: Callable[[Any], Any], expected: Any) -> TruthFunction:
    kind: type[Any] = type(expected)
    if kind is str:
        return lambda doc: get(doc) == expected
    if kind is bool or expected is None:
        return lambda doc: get(doc) is expected
    equal = cel_equal
    return lambda doc: (found := get(doc)) is not _MISSING and equal(found, expected)


def _ordering(get: Callable[[Any], Any], expected: Any, holds: Callable[[Any, Any], bool]) -> TruthFunction:
    kind: type[Any] = type(expected)
    if kind is str:
        return lambda doc: type(found := get(doc)) is str and holds(found, expected)
    rounded = float(expected)
    if kind is int:

        def above_int(doc: Any) -> bool:
            found = get(doc)
            if type(found) is int:
                return holds(found, expected)
            return type(found) is float and holds(found, rounded)

        return above_int

    def above_double(doc: Any) -> bool:
        found = get(doc)
        return (type(found) is float or type(found) is int) and holds(float(found), rounded)

    return above_double


def compile_value(node: Node) -> ValueFunction:
    """The node's value on a document; raises EvaluationError where CEL has an error."""
    if isinstance(node, Const):
        if node.kind != "json":
            raise NotCompilableError
        known = node.value
        return lambda _d, _x: known
    if isinstance(node, Ident):
        return _ident(node.name)
    if isinstance(node, Select):
        return _select(node)
    if isinstance(node, ListLiteral):
        items = [compile_value(item) for item in node.items]
        return lambda d, x: [item(d, x) for item in items]
    if isinstance(node, Quantified):
        return _quantified(node)
    if isinstance(node, MapLiteral):
        raise NotCompilableError
    return _call(node)


def _ident(name: str) -> ValueFunction:
    if name == DOC:
        return lambda d, _x: d
    if "." in name or name in ("bool", "int", "uint", "double", "string", "list", "map", "null_type", "type"):
        raise NotCompilableError
    return lambda _d, x: x


def _select(node: Select) -> ValueFunction:
    operand, name = compile_value(node.operand), node.field
    if node.test:

        def has(d: Any, x: Any) -> bool:
            found = operand(d, x)
            if type(found) is not dict:
                raise EvaluationError
            return name in found

        return has

    def select(d: Any, x: Any) -> Any:
        found = operand(d, x)
        if type(found) is not dict or name not in found:
            raise EvaluationError
        return found[name]

    return select


def _call(node: Call) -> ValueFunction:
    function, args = node.function, [compile_value(argument) for argument in node.args]
    if function in ("_&&_", "_||_"):
        return _logic(args[0], args[1], function == "_||_")
    if function == "_?_:_":
        return _choice(*args)
    if function == "!_":
        return _not(args[0])
    if function in ("-_", "size"):
        one, compute = args[0], cel_negate if function == "-_" else cel_size
        return lambda d, x: compute(one(d, x))
    if len(args) != 2:
        raise NotCompilableError
    first, second = args
    if function == "_==_":
        return lambda d, x: cel_equal(first(d, x), second(d, x))
    if function == "_!=_":
        return lambda d, x: not cel_equal(first(d, x), second(d, x))
    if function in _COMPARE:
        holds = _COMPARE[function]
        return lambda d, x: holds(*comparable_pair(first(d, x), second(d, x)))
    if function == "@in":
        return lambda d, x: cel_in(first(d, x), second(d, x))
    if function in _ARITHMETIC:
        compute_two = _ARITHMETIC[function]
        return lambda d, x: compute_two(first(d, x), second(d, x))
    if function in _TEXT:
        return _text(first, second, _TEXT[function], search=function == "contains")
    if function == "_[_]":
        return _index(first, second)
    raise NotCompilableError


def _text(
    first: ValueFunction, second: ValueFunction, holds: Callable[[str, str], bool], *, search: bool
) -> ValueFunction:
    def found(d: Any, x: Any) -> bool:
        one, other = first(d, x), second(d, x)
        if type(one) is not str or type(other) is not str:
            raise EvaluationError
        if search:
            charge(search_steps(len(one), len(other)))
        elif len(other) >= _SHORT:
            charge(len(other) >> TEXT_SHIFT)
        return holds(one, other)

    return found


def _index(first: ValueFunction, second: ValueFunction) -> ValueFunction:
    def index(d: Any, x: Any) -> Any:
        container, key = first(d, x), second(d, x)
        if type(container) is dict:
            if type(key) is str and key in container:
                return container[key]
        elif type(container) is list:
            if type(key) is float and key.is_integer():
                key = int(key)
            if type(key) is int and 0 <= key < cel_size(container):
                return container[key]
        raise EvaluationError

    return index


def _absorbed(calls: Iterable[tuple[ValueFunction, Any]], d: Any, absorbing: bool) -> bool:
    """AND and OR of many parts: the absorbing value decides even if others are errors."""
    failed = False
    for part, x in calls:
        try:
            found = part(d, x)
        except EvaluationError:
            failed = True
            continue
        if found is absorbing:
            return absorbing
        if type(found) is not bool:
            failed = True
    if failed:
        raise EvaluationError
    return not absorbing


def _logic(first: ValueFunction, second: ValueFunction, absorbing: bool) -> ValueFunction:
    return lambda d, x: _absorbed(((first, x), (second, x)), d, absorbing)


def _choice(condition: ValueFunction, then: ValueFunction, otherwise: ValueFunction) -> ValueFunction:
    def choose(d: Any, x: Any) -> Any:
        found = condition(d, x)
        if type(found) is not bool:
            raise EvaluationError
        return then(d, x) if found else otherwise(d, x)

    return choose


def _not(operand: ValueFunction) -> ValueFunction:
    def negated(d: Any, x: Any) -> bool:
        found = operand(d, x)
        if type(found) is not bool:
            raise EvaluationError
        return not found

    return negated


def _count(node: Node) -> int:
    return 1 + sum(_count(child) for child in children(node))


def _elements(node: Quantified) -> ValueFunction:
    """The elements of a quantifier; visiting all of them is charged first."""
    over, steps = compile_value(node.range), _count(node.condition)

    def elements(d: Any, x: Any) -> Any:
        found = over(d, x)
        if type(found) is not list and type(found) is not dict:
            raise EvaluationError
        charge(steps * cel_size(found))
        return found

    return elements


def is_metered(node: Node) -> bool:
    """Whether evaluating the node may charge steps; comparisons with scalars do not."""
    if isinstance(node, Const):
        return False
    if isinstance(node, Call):
        if node.function in ("_&&_", "_||_"):
            return any(map(is_metered, node.args))
        found = _comparison_truth(node)
        compared_with = as_constant(node.args[-1])
        is_list = compared_with is not None and type(compared_with.value) in (list, dict)
        return found is None or (node.function == "_==_" and is_list)
    return not (isinstance(node, Select) and field_path(Select(node.operand, node.field)) is not None)


def _quantified(node: Quantified) -> ValueFunction:
    elements, condition = _elements(node), compile_value(node.condition)

    if node.quantifier == "exists_one":

        def exists_one(d: Any, x: Any) -> bool:
            count = 0
            for item in elements(d, x):
                found = condition(d, item)
                if type(found) is not bool:
                    raise EvaluationError
                count += found
            return count == 1

        return exists_one
    absorbing = node.quantifier == "exists"
    return lambda d, x: _absorbed(((condition, item) for item in elements(d, x)), d, absorbing)
