"""Predicates as columns of Spark: decided in the engine, with nobody's Python.

A document is a variant. An error is NULL, and NULL is no match: AND, OR and NOT of SQL then say about errors
what CEL says. What cannot be said exactly raises `NotLoweredError` and is left to the matcher: equality of
lists and maps, conversions, an index that is computed, division by a field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tailrace.spark.live_queries.cells import (
    TypedValue,
    ValueOperations,
    any_of,
    boolean_value,
    conditional_value,
)
from tailrace.watch.cel import DOC, Call, Const, Ident, ListLiteral, Node, Quantified, Select, children
from tailrace.watch.evaluation_cost import STEPS_MAX
from tailrace.watch.evaluator import NotCompilableError

if TYPE_CHECKING:
    from pyspark.sql import Column

FieldAccessor = Callable[[str], "Column"]  # a field of the document, as a variant; NULL if there is none

_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "_<_": operator.lt,
    "_<=_": operator.le,
    "_>_": operator.gt,
    "_>=_": operator.ge,
}
_TEXT_METHODS: Final = {"contains": "contains", "startsWith": "startswith", "endsWith": "endswith"}
_ARITHMETIC: Final = frozenset(("_+_", "_-_", "_*_", "_/_", "_%_"))


class LoweredPredicate(NamedTuple):
    """Whether a document matches; and whether that takes too many steps to say, and was not decided."""

    holds: Column
    undecided: Column


def lower_predicate(node: Node, field: FieldAccessor) -> LoweredPredicate:
    """A predicate over the document whose fields are given."""
    from pyspark.sql import functions as f

    lowering = _PredicateCompiler(field)
    holds = f.coalesce(lowering.truth(node), f.lit(False))
    costly = [f.coalesce(one, f.lit(False)) for one in lowering.costly]
    return LoweredPredicate(holds, any_of(costly) if costly else f.lit(False))


class _PredicateCompiler:
    """One predicate."""

    def __init__(self, field: FieldAccessor) -> None:
        from pyspark.sql import functions

        self._f = functions
        self._cells = ValueOperations()
        self._field = field
        self._variable: tuple[str, TypedValue] | None = None  # what a quantifier looks at
        self.costly: list[Column] = []

    # -- what is true, false, or an error --------------------------------------------------------------

    def truth(self, node: Node) -> Column:
        f = self._f
        if isinstance(node, Const):
            return f.lit(node.value if type(node.value) is bool else None).cast("boolean")
        if isinstance(node, Quantified):
            return self._quantified(node)
        if isinstance(node, Select) and node.test:
            return self._has(node)
        if isinstance(node, Call):
            found = self._call_truth(node)
            if found is not None:
                return found
        return self._cells.as_truth(self.cell(node))

    def _call_truth(self, node: Call) -> Column | None:
        f, function, args = self._f, node.function, node.args
        if function == "_&&_":
            return self.truth(args[0]) & self.truth(args[1])
        if function == "_||_":
            return self.truth(args[0]) | self.truth(args[1])
        if function == "!_":
            return ~self.truth(args[0])
        if function == "_?_:_":
            condition = self.truth(args[0])
            return f.when(condition, self.truth(args[1])).when(~condition, self.truth(args[2]))
        if function == "_==_":
            return self._cells.equal(self.cell(args[0]), self.cell(args[1]))
        if function == "_!=_":
            return ~self._cells.equal(self.cell(args[0]), self.cell(args[1]))
        if function in _COMPARISONS:
            return self._cells.ordered(self.cell(args[0]), self.cell(args[1]), _COMPARISONS[function])
        if function == "@in":
            return self._contained(args[0], args[1])
        if function in _TEXT_METHODS and len(args) == 2:
            return self._cells.text(self.cell(args[0]), self.cell(args[1]), _TEXT_METHODS[function])
        return None

    def _has(self, node: Select) -> Column:
        if isinstance(node.operand, Ident) and node.operand.name == DOC:
            return self._field(node.field).isNotNull()
        return self._cells.has(self.cell(node.operand), node.field)

    # -- values ----------------------------------------------------------------------------------------

    def cell(self, node: Node) -> TypedValue:
        cells = self._cells
        if isinstance(node, Const):
            if node.kind != "json":
                raise NotCompilableError
            return cells.constant(node.value)
        if isinstance(node, Ident):
            if self._variable is None or node.name != self._variable[0]:
                raise NotCompilableError
            return self._variable[1]
        if isinstance(node, Select) and not node.test:
            return self._selected(node.operand, node.field)
        if isinstance(node, Call):
            return self._call(node)
        if isinstance(node, Quantified | Select):
            return boolean_value(self.truth(node))
        raise NotCompilableError

    def _selected(self, operand: Node, name: str) -> TypedValue:
        if isinstance(operand, Ident) and operand.name == DOC:
            return self._cells.variant(self._field(name))
        return self._cells.selected(self.cell(operand), name)

    def _call(self, node: Call) -> TypedValue:
        cells, function, args = self._cells, node.function, node.args
        if function == "_[_]":
            return self._indexed(args[0], args[1])
        if function in _ARITHMETIC:
            if function == "_/_" and not isinstance(args[1], Const):
                raise NotCompilableError  # the sign of a zero is not kept in a variant
            return cells.computed(function, self.cell(args[0]), self.cell(args[1]))
        if function == "-_":
            return cells.negated(self.cell(args[0]))
        if function == "size":
            return cells.size(self.cell(args[0]))
        if function == "_?_:_":
            return conditional_value(self.truth(args[0]), self.cell(args[1]), self.cell(args[2]))
        found = self._call_truth(node)
        if found is None:
            raise NotCompilableError
        return boolean_value(found)

    def _indexed(self, operand: Node, index: Node) -> TypedValue:
        key = index.value if isinstance(index, Const) and index.kind == "json" else None
        if type(key) is str:
            return self._selected(operand, key)
        if isinstance(operand, Ident) and operand.name == DOC:
            raise NotCompilableError
        if type(key) is float and key.is_integer():
            key = int(key)
        if type(key) is int and 0 <= key < 2**31:
            return self._cells.item(self.cell(operand), key)
        raise NotCompilableError

    # -- several values --------------------------------------------------------------------------------

    def _contained(self, value: Node, container: Node) -> Column:
        cells, wanted = self._cells, self.cell(value)
        if isinstance(container, ListLiteral):
            # An error is an error even if there is nothing to compare with.
            known = self._f.when(wanted.exists, self._f.lit(False))
            return any_of([known, *(cells.equal(wanted, self.cell(item)) for item in container.items)])
        within = self.cell(container)
        self._bound(cells.length(within), STEPS_MAX)
        return cells.contained(wanted, within)

    def _quantified(self, node: Quantified) -> Column:
        f, cells, within = self._f, self._cells, self.cell(node.range)
        self._bound(cells.length(within), STEPS_MAX // _node_count(node.condition))

        def over(items: Column, as_cell: Callable[[Column], TypedValue]) -> Column:
            def condition(item: Column) -> Column:
                self._variable = (node.variable, as_cell(item))
                try:
                    return self.truth(node.condition)
                finally:
                    self._variable = None

            if node.quantifier == "exists":
                return f.exists(items, condition)
            if node.quantifier == "all":
                return f.forall(items, condition)

            def fails(item: Column) -> Column:
                return condition(item).isNull()

            failed = f.exists(items, fails)
            return f.when(~failed, f.size(f.filter(items, condition)) == 1)

        return cells.each(within, over)

    def _bound(self, length: Column, most: int) -> None:
        if self._variable is not None:
            raise NotCompilableError  # whether it is too long is only known inside
        self.costly.append(length > most)


def _node_count(node: Node) -> int:
    return 1 + sum(_node_count(child) for child in children(node))
