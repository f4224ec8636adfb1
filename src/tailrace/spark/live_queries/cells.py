"""Values of expressions as columns: of which kinds they may be, when they are, and what they are then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tailrace.watch.evaluator import INT_MIN, NotCompilableError

if TYPE_CHECKING:
    from pyspark.sql import Column

SIZE_MAX: Final = 400  # alternatives that one expression is made of: each level may double them
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
    """One kind that a value may be of."""

    when: Column  # it is
    value: Column  # then


class TypedValue(NamedTuple):
    """A value by its kinds. Where none of them holds there is an error."""

    forms: dict[str, TypedColumn]
    size: int = 1  # how large the expression is

    @property
    def exists(self) -> Column:
        return any_of([form.when for form in self.forms.values()])


def any_of(conditions: Sequence[Column]) -> Column:
    """True if one of them is; an error if one of the others is."""
    found = conditions[0]
    for condition in conditions[1:]:
        found = found | condition
    return found


def first_case(cases: Sequence[tuple[Column, Column]]) -> Column:
    """The value of the first case that holds, NULL if none does."""
    from pyspark.sql import functions as f

    found = f.when(*cases[0])
    for case in cases[1:]:
        found = found.when(*case)
    return found


def boolean_value(truth: Column) -> TypedValue:
    return TypedValue({"bool": TypedColumn(truth.isNotNull(), truth)})


def conditional_value(condition: Column, then: TypedValue, otherwise: TypedValue) -> TypedValue:
    """One or the other; an error where the condition is one."""
    forms: dict[str, TypedColumn] = {}
    for kind in then.forms.keys() | otherwise.forms.keys():
        chosen = ((condition, then.forms.get(kind)), (~condition, otherwise.forms.get(kind)))
        cases = [(wanted & form.when, form.value) for wanted, form in chosen if form is not None]
        forms[kind] = TypedColumn(any_of([when for when, _ in cases]), first_case(cases))
    return _limit_size(forms, then.size + otherwise.size)


def _limit_size(forms: dict[str, TypedColumn], size: int) -> TypedValue:
    if size > SIZE_MAX:
        raise NotCompilableError
    return TypedValue(forms, size)


class ValueOperations:
    """Operations on cells, under CEL's rules."""

    def __init__(self) -> None:
        from pyspark.sql import functions

        self._f = functions

    def constant(self, value: Any) -> TypedValue:
        kind = _KINDS.get(value.__class__)
        if kind is None:
            raise NotCompilableError
        lit = self._f.lit(value).cast(_SPARK_TYPES[kind]) if kind in _SPARK_TYPES else self._f.lit(None)
        return TypedValue({kind: TypedColumn(self._f.lit(True), lit)})

    def variant(self, held: Column) -> TypedValue:
        """A value of a document."""
        f = self._f
        kind = f.schema_of_variant(held)
        fractional = kind.startswith("DECIMAL") | (kind == "DOUBLE")
        return TypedValue(
            {
                "null": TypedColumn(kind == "VOID", f.lit(None)),
                "bool": TypedColumn(kind == "BOOLEAN", held.try_cast("boolean")),
                "int": TypedColumn(kind == "BIGINT", held.try_cast("bigint")),
                "double": TypedColumn(fractional, held.try_cast("double")),
                "string": TypedColumn(kind == "STRING", held.try_cast("string")),
                "list": TypedColumn(kind.startswith("ARRAY"), held),
                "map": TypedColumn(kind.startswith("OBJECT"), held),
            }
        )

    def string(self, held: Column) -> TypedValue:
        return TypedValue({"string": TypedColumn(held.isNotNull(), held)})

    def as_truth(self, cell: TypedValue) -> Column:
        form = cell.forms.get("bool")
        return self._f.lit(None).cast("boolean") if form is None else self._f.when(form.when, form.value)

    # -- parts of documents ----------------------------------------------------------------------------

    def selected(self, cell: TypedValue, name: str) -> TypedValue:
        form = cell.forms.get("map")
        if form is None:
            raise NotCompilableError
        return self.variant(self.inner(form, variant_path(name)))

    def item(self, cell: TypedValue, index: int) -> TypedValue:
        form = cell.forms.get("list")
        if form is None:
            raise NotCompilableError
        return self.variant(self.inner(form, f"$[{index}]"))

    def inner(self, form: TypedColumn, path: str) -> Column:
        return self._f.when(form.when, self._f.try_variant_get(form.value, path, "variant"))

    def has(self, cell: TypedValue, name: str) -> Column:
        form = cell.forms.get("map")
        if form is None:
            raise NotCompilableError
        found = self._f.try_variant_get(form.value, variant_path(name), "variant")
        return self._f.when(form.when, found.isNotNull())

    def _items(self, form: TypedColumn) -> Column:
        f = self._f
        nothing = f.parse_json(f.lit("null"))
        return f.transform(form.value.try_cast("array<variant>"), lambda item: f.coalesce(item, nothing))

    def _keys(self, form: TypedColumn) -> Column:
        return self._f.map_keys(form.value.try_cast("map<string,variant>"))

    def each(
        self, cell: TypedValue, over: Callable[[Column, Callable[[Column], TypedValue]], Column]
    ) -> Column:
        """Over the values of a list, or the keys of a map."""
        many, keyed = cell.forms.get("list"), cell.forms.get("map")
        if many is None or keyed is None:
            raise NotCompilableError
        found = self._f.when(many.when, over(self._items(many), self.variant))
        return found.when(keyed.when, over(self._keys(keyed), self.string))

    def length(self, cell: TypedValue) -> Column:
        """How many values a list or a map has."""
        many, keyed = cell.forms.get("list"), cell.forms.get("map")
        if many is None or keyed is None:
            raise NotCompilableError
        found = self._f.when(many.when, self._f.size(self._items(many)))
        return found.when(keyed.when, self._f.size(self._keys(keyed)))

    # -- comparing -------------------------------------------------------------------------------------

    def equal(self, one: TypedValue, other: TypedValue) -> Column:
        f = self._f
        if one.forms.keys() & other.forms.keys() & CONTAINER_KINDS:
            raise NotCompilableError  # element by element, numbers by value
        cases: list[tuple[Column, Column]] = []
        for kind, left in one.forms.items():
            for kind_other, right in other.forms.items():
                same = self._same(kind, kind_other, left.value, right.value)
                if same is not None:
                    cases.append((left.when & right.when, same))
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
        """Two numbers in one form; an integer beside a double is rounded to one."""
        if {kind, kind_other} == {"int", "double"}:
            return left.cast("double"), right.cast("double")
        return (left, right) if kind == kind_other and kind in ("int", "double") else None

    def ordered(self, one: TypedValue, other: TypedValue, holds: Callable[[Any, Any], Any]) -> Column:
        f = self._f
        cases: list[tuple[Column, Column]] = []
        for kind, left in one.forms.items():
            for kind_other, right in other.forms.items():
                pair = self._numbers(kind, kind_other, left.value, right.value)
                if pair is None and kind == kind_other and kind in ("string", "bool"):
                    pair = left.value, right.value
                if pair is None:
                    continue
                said = holds(*pair)
                if "double" in (kind, kind_other):
                    said = ~f.isnan(pair[0]) & ~f.isnan(pair[1]) & said
                cases.append((left.when & right.when, said))
        return first_case(cases) if cases else f.lit(None).cast("boolean")

    def contained(self, wanted: TypedValue, within: TypedValue) -> Column:
        f, many, keyed = self._f, within.forms.get("list"), within.forms.get("map")
        if many is None or keyed is None:
            raise NotCompilableError

        def is_wanted(item: Column) -> Column:
            return self.equal(wanted, self.variant(item))

        among = f.exists(self._items(many), is_wanted)
        found = f.when(many.when & wanted.exists, among)
        for kind, form in wanted.forms.items():
            if kind == "string":
                named = f.array_contains(self._keys(keyed), form.value)
                found = found.when(keyed.when & form.when, named)
            elif kind in ("int", "bool", "double"):
                found = found.when(keyed.when & form.when, f.lit(False))
        return found

    def text(self, one: TypedValue, other: TypedValue, method: str) -> Column:
        f, left, right = self._f, one.forms.get("string"), other.forms.get("string")
        if left is None or right is None:
            return f.lit(None).cast("boolean")
        return f.when(left.when & right.when, getattr(left.value, method)(right.value))

    # -- computing -------------------------------------------------------------------------------------

    def size(self, cell: TypedValue) -> TypedValue:
        f = self._f
        cases: list[tuple[Column, Column]] = []
        if (text := cell.forms.get("string")) is not None:
            cases.append((text.when, f.char_length(text.value)))
        if (many := cell.forms.get("list")) is not None:
            cases.append((many.when, f.size(self._items(many))))
        if (keyed := cell.forms.get("map")) is not None:
            cases.append((keyed.when, f.size(self._keys(keyed))))
        if not cases:
            raise NotCompilableError
        value = first_case(cases).cast("bigint")
        return _limit_size({"int": TypedColumn(value.isNotNull(), value)}, 2 * cell.size)

    def negated(self, cell: TypedValue) -> TypedValue:
        forms: dict[str, TypedColumn] = {}
        if (whole := cell.forms.get("int")) is not None:
            least = self._f.lit(INT_MIN)
            value = self._f.when(whole.value != least, -whole.value)
            forms["int"] = TypedColumn(whole.when & value.isNotNull(), value)
        if (fraction := cell.forms.get("double")) is not None:
            forms["double"] = TypedColumn(fraction.when, -fraction.value)
        if not forms:
            raise NotCompilableError
        return _limit_size(forms, 2 * cell.size)

    def computed(self, function: str, one: TypedValue, other: TypedValue) -> TypedValue:
        forms: dict[str, TypedColumn] = {}
        for kind in ("int", "double", "string", "list"):
            left, right = one.forms.get(kind), other.forms.get(kind)
            if left is None or right is None:
                continue
            value = self._computed(function, kind, left.value, right.value)
            if value is not None:
                forms[kind] = TypedColumn(left.when & right.when & value.isNotNull(), value)
        if not forms:
            raise NotCompilableError
        return _limit_size(forms, 2 * (one.size + other.size))

    def _computed(self, function: str, kind: str, left: Column, right: Column) -> Column | None:
        """NULL where there is no value; None where the kind has no such operation."""
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
    """Names as a path into a variant; the quotes around one cannot be in it."""
    steps: list[str] = []
    for name in names:
        quote = "'" if '"' in name else '"'
        if quote in name:
            raise NotCompilableError
        steps.append(f"[{quote}{name}{quote}]")
    return "$" + "".join(steps)
