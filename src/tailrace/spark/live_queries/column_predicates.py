"""Predicates of live queries compiled to Spark columns, and `matching`, which filters a DataFrame by them.

The predicate is evaluated by Spark's engine, without Python workers. A document is a variant. A CEL value is
a TypedValue: for each type that it may have, a column with its presence and a column with the value. An
error is NULL, and NULL is no match: AND, OR and NOT of SQL treat NULL as CEL treats errors. Expressions
without an exact translation raise `NotCompilableError`: equality of lists and maps, conversions, a computed
index, and division by a field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tailrace.watch.cel import (
    DOC,
    Call,
    Const,
    Ident,
    ListLiteral,
    Node,
    Quantified,
    Select,
    children,
    conjoin,
)
from tailrace.watch.document import RESERVED_FIELDS
from tailrace.watch.evaluation_cost import STEPS_MAX
from tailrace.watch.evaluator import INT_MIN, NotCompilableError
from tailrace.watch.query import read_query

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


SIZE_MAX: Final = 400  # of an expression: each level may double it
CONTAINER_KINDS: Final = frozenset({"list", "map"})
_SPARK_TYPES: Final = {"bool": "boolean", "int": "bigint", "double": "double", "string": "string"}
_KINDS: Final[dict[type[Any], str]] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "double",
    str: "string",
}


class TypedColumn(NamedTuple):
    """The value for one type that it may have."""

    is_present: Column  # whether the value has this type
    value: Column


class TypedValue(NamedTuple):
    """A value by its possible types. It is an error where none of them is present."""

    columns_by_kind: dict[str, TypedColumn]
    size: int = 1  # of the expression

    @property
    def exists(self) -> Column:
        return any_of([column.is_present for column in self.columns_by_kind.values()])


def any_of(conditions: Sequence[Column]) -> Column:
    """True if one condition is true; else an error if one is an error."""
    found = conditions[0]
    for condition in conditions[1:]:
        found = found | condition
    return found


def first_case(cases: Sequence[tuple[Column, Column]]) -> Column:
    """The value of the first case whose condition is true, NULL if none is."""
    from pyspark.sql import functions as f

    found = f.when(*cases[0])
    for case in cases[1:]:
        found = found.when(*case)
    return found


def boolean_value(truth: Column) -> TypedValue:
    return TypedValue({"bool": TypedColumn(truth.isNotNull(), truth)})


def conditional_value(condition: Column, then: TypedValue, otherwise: TypedValue) -> TypedValue:
    """CEL's `?:`; an error if the condition is an error."""
    forms: dict[str, TypedColumn] = {}
    for kind in then.columns_by_kind.keys() | otherwise.columns_by_kind.keys():
        chosen = (
            (condition, then.columns_by_kind.get(kind)),
            (~condition, otherwise.columns_by_kind.get(kind)),
        )
        cases = [(branch & form.is_present, form.value) for branch, form in chosen if form is not None]
        forms[kind] = TypedColumn(any_of([present for present, _ in cases]), first_case(cases))
    return _limit_size(forms, then.size + otherwise.size)


def _limit_size(forms: dict[str, TypedColumn], size: int) -> TypedValue:
    if size > SIZE_MAX:
        raise NotCompilableError
    return TypedValue(forms, size)


class ValueOperations:
    """CEL's operations on typed values."""

    def __init__(self) -> None:
        from pyspark.sql import functions

        self._f = functions

    def constant(self, value: Any) -> TypedValue:
        kind = _KINDS.get(value.__class__)
        if kind is None:
            raise NotCompilableError
        lit = self._f.lit(value).cast(_SPARK_TYPES[kind]) if kind in _SPARK_TYPES else self._f.lit(None)
        return TypedValue({kind: TypedColumn(self._f.lit(True), lit)})

    def variant(self, column: Column) -> TypedValue:
        """A variant, from a document, as a typed value."""
        f = self._f
        kind = f.schema_of_variant(column)
        fractional = kind.startswith("DECIMAL") | (kind == "DOUBLE")
        return TypedValue(
            {
                "null": TypedColumn(kind == "VOID", f.lit(None)),
                "bool": TypedColumn(kind == "BOOLEAN", column.try_cast("boolean")),
                "int": TypedColumn(kind == "BIGINT", column.try_cast("bigint")),
                "double": TypedColumn(fractional, column.try_cast("double")),
                "string": TypedColumn(kind == "STRING", column.try_cast("string")),
                "list": TypedColumn(kind.startswith("ARRAY"), column),
                "map": TypedColumn(kind.startswith("OBJECT"), column),
            }
        )

    def string(self, column: Column) -> TypedValue:
        return TypedValue({"string": TypedColumn(column.isNotNull(), column)})

    def as_truth(self, cell: TypedValue) -> Column:
        form = cell.columns_by_kind.get("bool")
        return (
            self._f.lit(None).cast("boolean") if form is None else self._f.when(form.is_present, form.value)
        )

    # -- parts of documents ----------------------------------------------------------------------------

    def selected(self, cell: TypedValue, name: str) -> TypedValue:
        form = cell.columns_by_kind.get("map")
        if form is None:
            raise NotCompilableError
        return self.variant(self.inner(form, variant_path(name)))

    def item(self, cell: TypedValue, index: int) -> TypedValue:
        form = cell.columns_by_kind.get("list")
        if form is None:
            raise NotCompilableError
        return self.variant(self.inner(form, f"$[{index}]"))

    def inner(self, form: TypedColumn, path: str) -> Column:
        return self._f.when(form.is_present, self._f.try_variant_get(form.value, path, "variant"))

    def has(self, cell: TypedValue, name: str) -> Column:
        form = cell.columns_by_kind.get("map")
        if form is None:
            raise NotCompilableError
        found = self._f.try_variant_get(form.value, variant_path(name), "variant")
        return self._f.when(form.is_present, found.isNotNull())

    def _items(self, form: TypedColumn) -> Column:
        f = self._f
        nothing = f.parse_json(f.lit("null"))
        return f.transform(form.value.try_cast("array<variant>"), lambda item: f.coalesce(item, nothing))

    def _keys(self, form: TypedColumn) -> Column:
        return self._f.map_keys(form.value.try_cast("map<string,variant>"))

    def each(
        self, cell: TypedValue, over: Callable[[Column, Callable[[Column], TypedValue]], Column]
    ) -> Column:
        """Apply `over` to the items of a list, or to the keys of a map."""
        many, keyed = cell.columns_by_kind.get("list"), cell.columns_by_kind.get("map")
        if many is None or keyed is None:
            raise NotCompilableError
        found = self._f.when(many.is_present, over(self._items(many), self.variant))
        return found.when(keyed.is_present, over(self._keys(keyed), self.string))

    def length(self, cell: TypedValue) -> Column:
        """The number of items of a list or map."""
        many, keyed = cell.columns_by_kind.get("list"), cell.columns_by_kind.get("map")
        if many is None or keyed is None:
            raise NotCompilableError
        found = self._f.when(many.is_present, self._f.size(self._items(many)))
        return found.when(keyed.is_present, self._f.size(self._keys(keyed)))

    # -- comparing -------------------------------------------------------------------------------------

    def equal(self, one: TypedValue, other: TypedValue) -> Column:
        f = self._f
        if one.columns_by_kind.keys() & other.columns_by_kind.keys() & CONTAINER_KINDS:
            raise NotCompilableError  # would have to compare by element, and numbers across types
        cases: list[tuple[Column, Column]] = []
        for kind, left in one.columns_by_kind.items():
            for kind_other, right in other.columns_by_kind.items():
                same = self._same(kind, kind_other, left.value, right.value)
                if same is not None:
                    cases.append((left.is_present & right.is_present, same))
        cases.append((one.exists & other.exists, f.lit(False)))
        return first_case(cases)

    def _same(self, kind: str, kind_other: str, left: Column, right: Column) -> Column | None:
        if kind == kind_other == "null":
            return self._f.lit(True)
        numbers = self._numbers(kind, kind_other, left, right)
        if numbers is not None:
            left, right = numbers
        elif kind != kind_other:
            return None
        if "double" in (kind, kind_other):
            return ~self._f.isnan(left) & ~self._f.isnan(right) & (left == right)
        return left == right

    def _numbers(
        self, kind: str, kind_other: str, left: Column, right: Column
    ) -> tuple[Column, Column] | None:
        """Two numbers with a common type; an integer is converted to double beside a double."""
        if {kind, kind_other} == {"int", "double"}:
            return left.cast("double"), right.cast("double")
        return (left, right) if kind == kind_other and kind in ("int", "double") else None

    def ordered(self, one: TypedValue, other: TypedValue, holds: Callable[[Any, Any], Any]) -> Column:
        f = self._f
        cases: list[tuple[Column, Column]] = []
        for kind, left in one.columns_by_kind.items():
            for kind_other, right in other.columns_by_kind.items():
                pair = self._numbers(kind, kind_other, left.value, right.value)
                if pair is None and kind == kind_other and kind in ("string", "bool"):
                    pair = left.value, right.value
                if pair is None:
                    continue
                result = holds(*pair)
                if "double" in (kind, kind_other):
                    result = ~f.isnan(pair[0]) & ~f.isnan(pair[1]) & result
                cases.append((left.is_present & right.is_present, result))
        return first_case(cases) if cases else f.lit(None).cast("boolean")

    def contained(self, value: TypedValue, within: TypedValue) -> Column:
        f, many, keyed = self._f, within.columns_by_kind.get("list"), within.columns_by_kind.get("map")
        if many is None or keyed is None:
            raise NotCompilableError

        def is_equal(item: Column) -> Column:
            return self.equal(value, self.variant(item))

        found = f.when(many.is_present & value.exists, f.exists(self._items(many), is_equal))
        for kind, form in value.columns_by_kind.items():
            if kind == "string":
                named = f.array_contains(self._keys(keyed), form.value)
                found = found.when(keyed.is_present & form.is_present, named)
            elif kind in ("int", "bool", "double"):
                found = found.when(keyed.is_present & form.is_present, f.lit(False))
        return found

    def text(self, one: TypedValue, other: TypedValue, method: str) -> Column:
        f, left, right = self._f, one.columns_by_kind.get("string"), other.columns_by_kind.get("string")
        if left is None or right is None:
            return f.lit(None).cast("boolean")
        return f.when(left.is_present & right.is_present, getattr(left.value, method)(right.value))

    # -- computing -------------------------------------------------------------------------------------

    def size(self, cell: TypedValue) -> TypedValue:
        f = self._f
        cases: list[tuple[Column, Column]] = []
        if (text := cell.columns_by_kind.get("string")) is not None:
            cases.append((text.is_present, f.char_length(text.value)))
        if (many := cell.columns_by_kind.get("list")) is not None:
            cases.append((many.is_present, f.size(self._items(many))))
        if (keyed := cell.columns_by_kind.get("map")) is not None:
            cases.append((keyed.is_present, f.size(self._keys(keyed))))
        if not cases:
            raise NotCompilableError
        value = first_case(cases).cast("bigint")
        return _limit_size({"int": TypedColumn(value.isNotNull(), value)}, 2 * cell.size)

    def negated(self, cell: TypedValue) -> TypedValue:
        forms: dict[str, TypedColumn] = {}
        if (whole := cell.columns_by_kind.get("int")) is not None:
            least = self._f.lit(INT_MIN)
            value = self._f.when(whole.value != least, -whole.value)
            forms["int"] = TypedColumn(whole.is_present & value.isNotNull(), value)
        if (fraction := cell.columns_by_kind.get("double")) is not None:
            forms["double"] = TypedColumn(fraction.is_present, -fraction.value)
        if not forms:
            raise NotCompilableError
        return _limit_size(forms, 2 * cell.size)

    def computed(self, function: str, one: TypedValue, other: TypedValue) -> TypedValue:
        forms: dict[str, TypedColumn] = {}
        for kind in ("int", "double", "string", "list"):
            left, right = one.columns_by_kind.get(kind), other.columns_by_kind.get(kind)
            if left is None or right is None:
                continue
            value = self._computed(function, kind, left.value, right.value)
            if value is not None:
                forms[kind] = TypedColumn(left.is_present & right.is_present & value.isNotNull(), value)
        if not forms:
            raise NotCompilableError
        return _limit_size(forms, 2 * (one.size + other.size))

    def _computed(self, function: str, kind: str, left: Column, right: Column) -> Column | None:
        """NULL if the operation is an error for the values; None if the type does not have it."""
        f = self._f
        if function == "_+_" and kind == "list":
            raise NotCompilableError
        if function == "_+_" and kind == "string":
            return f.concat(left, right)
        if kind == "double":
            plain = {"_+_": left + right, "_-_": left - right, "_*_": left * right, "_/_": left / right}
            return plain.get(function)
        if kind != "int":
            return None
        whole = {"_+_": f.try_add, "_-_": f.try_subtract, "_*_": f.try_multiply}
        if function in whole:
            return whole[function](left, right)
        fits = (right != 0) & ~((left == f.lit(INT_MIN)) & (right == -1))
        if function == "_%_":
            return f.when(fits, left % right)
        return f.when(fits, f.call_function("div", left, right))


def variant_path(*names: str) -> str:
    """A path into a variant. A name with both kinds of quotes cannot be expressed."""
    steps: list[str] = []
    for name in names:
        quote = "'" if '"' in name else '"'
        if quote in name:
            raise NotCompilableError
        steps.append(f"[{quote}{name}{quote}]")
    return "$" + "".join(steps)


FieldAccessor = Callable[[str], "Column"]  # a field of the document as a variant; NULL if absent

_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "_<_": operator.lt,
    "_<=_": operator.le,
    "_>_": operator.gt,
    "_>=_": operator.ge,
}
_TEXT_METHODS: Final = {"contains": "contains", "startsWith": "startswith", "endsWith": "endswith"}
_ARITHMETIC: Final = frozenset(("_+_", "_-_", "_*_", "_/_", "_%_"))


class LoweredPredicate(NamedTuple):
    """Whether a document matches; and whether the cost limit was exceeded, so that `holds` is meaningless."""

    holds: Column
    undecided: Column


def lower_predicate(node: Node, field: FieldAccessor) -> LoweredPredicate:
    """Compile a predicate over the document whose fields `field` returns."""
    from pyspark.sql import functions as f

    lowering = _PredicateCompiler(field)
    holds = f.coalesce(lowering.truth(node), f.lit(False))
    costly = [f.coalesce(one, f.lit(False)) for one in lowering.costly]
    return LoweredPredicate(holds, any_of(costly) if costly else f.lit(False))


class _PredicateCompiler:
    """Compiles one predicate; `costly` collects the conditions under which it exceeds the cost limit."""

    def __init__(self, field: FieldAccessor) -> None:
        from pyspark.sql import functions

        self._f = functions
        self._cells = ValueOperations()
        self._field = field
        self._variable: tuple[str, TypedValue] | None = None  # of the current quantifier
        self.costly: list[Column] = []

    # -- truth values ----------------------------------------------------------------------------------

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
                raise NotCompilableError  # a variant does not store the sign of zero
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

    # -- lists and maps --------------------------------------------------------------------------------

    def _contained(self, value: Node, container: Node) -> Column:
        cells, needle = self._cells, self.cell(value)
        if isinstance(container, ListLiteral):
            # An error is an error even if the list is empty.
            known = self._f.when(needle.exists, self._f.lit(False))
            return any_of([known, *(cells.equal(needle, self.cell(item)) for item in container.items)])
        within = self.cell(container)
        self._limit_length(cells.length(within), STEPS_MAX)
        return cells.contained(needle, within)

    def _quantified(self, node: Quantified) -> Column:
        f, cells, within = self._f, self._cells, self.cell(node.range)
        self._limit_length(cells.length(within), STEPS_MAX // _node_count(node.condition))

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

    def _limit_length(self, length: Column, length_max: int) -> None:
        if self._variable is not None:
            raise NotCompilableError  # the length depends on the item of the outer quantifier
        self.costly.append(length > length_max)


def _node_count(node: Node) -> int:
    return 1 + sum(_node_count(child) for child in children(node))


ImageName = Literal["before", "after"]

_STAMPS: Final = {
    "before": {"version": ("prev", "version"), "updatedAt": ("prev", "updatedAt")},
    "after": {"version": ("version",)},
}
_SAME: Final = {"id": ("documentKey",), "collection": ("collection",), "createdAt": ("createdAt",)}


def document_image(entry: Column, updated_ms: Column, which: ImageName) -> FieldAccessor:
    """The flat document before or after a change, field by field; `entry` is the change as a variant."""
    from pyspark.sql import functions as f

    stamps = _SAME | _STAMPS[which]

    def field(name: str) -> Column:
        if name in stamps:
            image = f.try_variant_get(entry, variant_path(which), "variant")
            value = f.try_variant_get(entry, variant_path(*stamps[name]), "variant")
            return f.when(_exists(image), value)
        if name == "updatedAt":
            image = f.try_variant_get(entry, variant_path(which), "variant")
            return f.when(_exists(image), f.parse_json(updated_ms.cast("string")))
        if name.startswith("src_"):
            raise NotCompilableError  # ambiguous: metadata of the source, or a field of this name
        if name in RESERVED_FIELDS or name.startswith("_"):
            return f.lit(None).cast("variant")
        return f.try_variant_get(entry, variant_path(which, name), "variant")

    def _exists(image: Column) -> Column:
        return ~f.is_variant_null(image)

    return field


def matching(frame: DataFrame, query: dict[str, Any], which: ImageName = "after") -> DataFrame:
    """The changes in a frame whose document, before or after the change, matches a live query.

    Evaluated by Spark's engine. Raises NotCompilableError if the query has no exact translation. A change on
    which the query exceeds the cost limit fails the job, because that is not the same as no match.
    """
    from pyspark.sql import functions as f

    parsed = read_query(query, live=True)
    entry = f.parse_json(f.col("value").cast("string"))
    updated_ms = f.call_function("div", f.col("timestamp_ns"), f.lit(1_000_000))
    image = document_image(entry, updated_ms, which)
    found = lower_predicate(conjoin([part.node for part in parsed.parts]), image)
    failed = f.raise_error(f.lit("query exceeds the cost limit on a change")).cast("boolean")
    holds = f.when(found.undecided, failed).otherwise(found.holds)
    is_change = f.try_variant_get(entry, variant_path("kind"), "string") == "change"
    named = f.lit(True) if parsed.documents is None else _is_one_of(image("id"), parsed.documents)
    return frame.filter(is_change & named & holds)


def _is_one_of(document_id: Column, documents: frozenset[str]) -> Column:
    return document_id.try_cast("string").isin(sorted(documents))
