"""Whether a schema accepts every value of a shape: the comparison behind lens proofs.

A shape over-approximates the values that a schema allows at a path: what holds for a shape holds for all
records. Unsupported keywords only widen it. Parts of a schema are read on demand, so that recursive schemas
terminate. A comparison that cannot be decided counts as not accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import msgspec

from tailrace.schema.json_schema import SchemaDocument, SchemaPath, compile_subschemas
from tailrace.schema.lenses import PointerTokens, format_pointer, json_type

ALL_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
LIMITS: Final = frozenset(
    [
        "minItems",
        "maxItems",
        "uniqueItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minProperties",
        "maxProperties",
    ]
)
_REFERENCES_MAX: Final = 100


class ValueShape:
    """The possible values at one path. `others` and `items` are None if any value is possible."""

    __slots__ = (
        "_pending",
        "items",
        "limits",
        "made_by",
        "others",
        "place",
        "props",
        "required",
        "types",
        "values",
    )

    def __init__(self, types: frozenset[str] = ALL_TYPES) -> None:
        self.types: frozenset[str] = types
        self.values: list[object] | None = None  # all possible values, if known
        self.props: dict[str, ValueShape] = {}
        self.required: set[str] = set()
        self.others: ValueShape | None = None  # properties not in `props`
        self.items: ValueShape | None = None
        self.limits: dict[str, object] = {}
        self.made_by: int | None = None  # index of the operation that wrote it
        self.place: tuple[SchemaDocument, SchemaPath] | None = None  # its schema, while unchanged
        self._pending = False

    @staticmethod
    def at(document: SchemaDocument, path: SchemaPath) -> ValueShape:
        shape = ValueShape()
        shape.place = (document, path)
        shape._pending = True
        return shape

    @staticmethod
    def from_values(values: Sequence[object]) -> ValueShape:
        """Exactly these values."""
        shape = ValueShape(frozenset(kind for value in values for kind in _expanded(json_type(value))))
        shape._set_values(list(values))
        return shape

    @property
    def never(self) -> bool:
        return not self.open().types

    def only(self, kind: str) -> bool:
        return self.open().types == frozenset({kind})

    def open(self) -> ValueShape:
        """Read the schema if that was not done yet."""
        if self._pending:
            self._pending = False
            assert self.place is not None
            self._describe(*self.place)
        return self

    def _describe(self, document: SchemaDocument, path: SchemaPath) -> None:
        node = document.node(path)
        for _ in range(_REFERENCES_MAX):
            if not isinstance(node, dict) or "$ref" not in node:
                break
            target = document.target(path)
            if target is None:
                return
            path, node = target, document.node(target)
        self.place = (document, path)
        if node is False:
            self.types = frozenset[str]()
        if not isinstance(node, dict) or "$ref" in node:
            return
        schema = cast("dict[str, object]", node)
        self._describe_types(schema)
        if self.values is not None:
            return  # other keywords cannot narrow it further
        for name in _object(schema.get("properties")):
            self.props[name] = ValueShape.at(document, (*path, "properties", name))
        if isinstance(required := schema.get("required"), list):
            self.required = {name for name in cast("list[object]", required) if isinstance(name, str)}
        if "additionalProperties" in schema and "patternProperties" not in schema:
            self.others = ValueShape.at(document, (*path, "additionalProperties"))
        if isinstance(schema.get("items"), dict | bool) and "prefixItems" not in schema:
            self.items = ValueShape.at(document, (*path, "items"))
        self.limits = {key: value for key, value in schema.items() if key in LIMITS}

    def _describe_types(self, schema: dict[str, object]) -> None:
        named = schema.get("type")
        if isinstance(named, str):
            self.types = _expanded(named)
        elif isinstance(named, list):
            self.types = frozenset(kind for one in cast("list[str]", named) for kind in _expanded(one))
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            values = [value for value in cast("list[object]", listed) if json_type(value) in self.types]
            self.types = frozenset(kind for value in values for kind in _expanded(json_type(value)))
            self._set_values(values)

    def _set_values(self, values: list[object]) -> None:
        self.values = values
        if self.types == frozenset({"object"}):
            objects = cast("list[dict[str, object]]", values)
            for name in dict.fromkeys(name for value in objects for name in value):
                self.props[name] = ValueShape.from_values([value[name] for value in objects if name in value])
            self.required = {name for name in self.props if all(name in value for value in objects)}
            self.others = NO_SHAPE
        elif self.types == frozenset({"array"}):
            arrays = cast("list[list[object]]", values)
            self.items = ValueShape.from_values([item for array in arrays for item in array])
            self.limits = {"minItems": min(map(len, arrays)), "maxItems": max(map(len, arrays))}

    def touch(self) -> None:
        """Called before an inner shape changes: statements about the whole no longer hold."""
        self.open()
        self.values = None
        self.place = None
        self.limits = {key: value for key, value in self.limits.items() if key in ("minItems", "maxItems")}

    def prop(self, name: str) -> ValueShape:
        """The shape of a property, copied into this object so that it can be changed."""
        found = self.open().props.get(name)
        if found is None:
            found = self.props[name] = (self.others or ANY_SHAPE).clone()
        return found

    def clone(self) -> ValueShape:
        copy = ValueShape(self.types)
        copy.values = self.values
        copy.props = {name: shape.clone() for name, shape in self.props.items()}
        copy.required = set(self.required)
        copy.others = self.others
        copy.items = None if self.items is None else self.items.clone()
        copy.limits = self.limits
        copy.made_by = self.made_by
        copy.place = self.place
        copy._pending = self._pending
        return copy


def _expanded(kind: str) -> frozenset[str]:
    """The JSON types of a kind: a number may be an integer."""
    return frozenset({"integer", "number"}) if kind == "number" else frozenset({kind})


def _object(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


ANY_SHAPE: Final = ValueShape()
NO_SHAPE: Final = ValueShape(frozenset[str]())


_ANNOTATIONS: Final = frozenset(
    [
        "$schema",
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    ]
)
_CONTENT: Final = frozenset({"contentEncoding", "contentMediaType", "contentSchema"})
_ENCODER: Final = msgspec.json.Encoder(order="sorted")


class UnprovenError(Exception):
    """The schema may reject a value. `made_by` is the operation that caused it, if there is one."""

    def __init__(self, reason: str, made_by: int | None) -> None:
        super().__init__(reason)
        self.made_by = made_by


class AcceptanceCheck:
    """Compares shapes with the schema that must accept them."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._validators = compile_subschemas(document)
        # Pairs that were compared, or are being compared in a caller: ends recursion.
        self._settled: set[tuple[SchemaPath, object]] = set()

    def check(
        self, path: SchemaPath, shape: ValueShape, at: PointerTokens = (), made_by: int | None = None
    ) -> None:
        """Raise UnprovenError unless the schema at `path` accepts every value of the shape."""
        if shape.never:
            return
        if shape.made_by is not None:
            made_by = shape.made_by
        pair = (path, id(shape) if shape.place is None else (id(shape.place[0]), shape.place[1]))
        if pair in self._settled:
            return
        self._settled.add(pair)
        node = self._document.node(path)
        if node is True or node == {} or self._same(node, shape):
            return
        values = shape.values
        if values is None and shape.types <= {"boolean", "null"}:
            values = [
                value for kind in shape.types for value in ((None,) if kind == "null" else (True, False))
            ]
        if values is not None:
            self._check_values(path, values, at, made_by)
            return
        if not isinstance(node, dict):
            raise UnprovenError(f"{format_pointer(at)} is not allowed by the new schema", made_by)
        _Comparison(self, self._document, cast("dict[str, object]", node), path, shape, at, made_by).run()

    def attempt(self, path: SchemaPath, shape: ValueShape, at: PointerTokens, made_by: int | None) -> bool:
        before = set(self._settled)
        try:
            self.check(path, shape, at, made_by)
        except UnprovenError:
            self._settled = before
            return False
        return True

    def _check_values(
        self, path: SchemaPath, values: Sequence[object], at: PointerTokens, made_by: int | None
    ) -> None:
        pointer = "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in path)
        validator = self._validators.get(f"#{pointer}")
        if validator is None or not all(validator.is_valid(value) for value in values):
            raise UnprovenError(f"{format_pointer(at)} may have a value that the new schema rejects", made_by)

    def _same(self, node: object, shape: ValueShape) -> bool:
        """Whether two schemas have the same text, without references."""
        if shape.place is None or shape.place[0].is_draft_7 != self._document.is_draft_7:
            return False
        ours = _ENCODER.encode(node)
        refers = b'"$ref"' in ours or b'"$dynamicRef"' in ours
        return not refers and ours == _ENCODER.encode(shape.place[0].node(shape.place[1]))


class _Comparison:
    """Compares one schema object with one shape, keyword by keyword."""

    def __init__(
        self,
        cover: AcceptanceCheck,
        document: SchemaDocument,
        schema: dict[str, object],
        path: SchemaPath,
        shape: ValueShape,
        at: PointerTokens,
        made_by: int | None,
    ) -> None:
        self._cover = cover
        self._document = document
        self._schema = schema
        self._path = path
        self._shape = shape
        self._at = at
        self._made_by = made_by

    def run(self) -> None:
        if "$ref" in self._schema:
            target = self._document.target(self._path)
            if target is None:
                raise self._no("cannot be followed through its $ref")
            self._cover.check(target, self._shape, self._at, self._made_by)
            if self._document.is_draft_7:
                return  # draft 7 ignores keywords beside a $ref
        for keyword, value in self._schema.items():
            rule = _RULES.get(keyword)
            if rule is not None:
                rule(self, value)
            elif keyword not in _ANNOTATIONS and (keyword not in _CONTENT or self._document.is_draft_7):
                raise self._no(f"cannot be decided because of {keyword}")

    def _no(self, what: str) -> UnprovenError:
        return UnprovenError(f"{format_pointer(self._at)} {what}", self._made_by)

    def _inner(self, path: SchemaPath, shape: ValueShape, *tokens: str) -> None:
        self._cover.check((*self._path, *path), shape, (*self._at, *tokens), self._made_by)

    def reference(self, _: object) -> None:
        """Followed before all other keywords."""

    def type(self, value: object) -> None:
        kinds = set(cast("list[str]", value)) if isinstance(value, list) else {cast("str", value)}
        if "number" in kinds:
            kinds.add("integer")
        if not self._shape.types <= kinds:
            found = (
                ", ".join(sorted(self._shape.types - kinds))
                if self._shape.types != ALL_TYPES
                else "any value"
            )
            raise self._no(f"may be {found}, which the new schema does not allow")

    def values(self, _: object) -> None:
        raise self._no("may hold a value that is not among those of the new schema")

    def properties(self, value: object) -> None:
        if "object" in self._shape.types:
            for name in cast("dict[str, object]", value):
                shape = self._shape.props.get(name, self._shape.others or ANY_SHAPE)
                self._inner(("properties", name), shape, name)

    def additional(self, _: object) -> None:
        if "object" not in self._shape.types:
            return
        declared = self._schema.get("properties", {})
        assert isinstance(declared, dict)
        for name, shape in self._shape.props.items():
            if name not in declared:
                self._inner(("additionalProperties",), shape, name)
        self._inner(("additionalProperties",), self._shape.others or ANY_SHAPE, "*")

    def required(self, value: object) -> None:
        if "object" in self._shape.types:
            for name in cast("list[str]", value):
                if name not in self._shape.required:
                    shape = self._shape.props.get(name)
                    gone = shape is not None and shape.never
                    what = (
                        "is required by the new schema and taken away"
                        if gone
                        else "is required by the new schema"
                    )
                    at = format_pointer((*self._at, name))
                    raise UnprovenError(f"{at} {what}", shape.made_by if shape else self._made_by)

    def items(self, value: object) -> None:
        if "array" in self._shape.types and self._number("maxItems", 1) > 0:
            if isinstance(value, list):
                raise self._no("cannot be decided because of items")
            self._inner(("items",), self._shape.items or ANY_SHAPE, "*")

    def all_of(self, value: object) -> None:
        for index in range(len(cast("list[object]", value))):
            self._inner(("allOf", str(index)), self._shape)

    def any_of(self, value: object) -> None:
        for index in range(len(cast("list[object]", value))):
            path = (*self._path, "anyOf", str(index))
            if self._cover.attempt(path, self._shape, self._at, self._made_by):
                return
        raise self._no("is not proven to match one of the new schema's alternatives")

    def format(self, value: object) -> None:
        if (
            value == "date-time"
            and "string" in self._shape.types
            and self._shape.limits.get("format") != value
        ):
            raise self._no("is not always a date-time")

    def unique(self, value: object) -> None:
        if value is True and "array" in self._shape.types:
            if self._shape.limits.get("uniqueItems") is not True and self._number("maxItems", 2) > 1:
                raise self._no("may hold equal items")

    def _number(self, keyword: str, default: float) -> float:
        found = self._shape.limits.get(keyword)
        return found if isinstance(found, int | float) else default

    def at_least(self, keyword: str, kind: str, value: object) -> None:
        """`minItems` and similar: the old bound must be as tight."""
        known = self._number(keyword, 0)
        if keyword == "minProperties":
            known = max(known, len(self._shape.required))
        if kind in self._shape.types and known < cast("float", value):
            raise self._no(f"is not proven to keep {keyword}")

    def at_most(self, keyword: str, kind: str, value: object) -> None:
        if kind in self._shape.types and self._number(keyword, float("inf")) > cast("float", value):
            raise self._no(f"is not proven to keep {keyword}")

    def bound(self, keyword: str, value: object) -> None:
        """`minimum` and similar; an exclusive bound implies the inclusive one."""
        sign = 1 if "inimum" in keyword else -1
        edge = "inimum" if sign == 1 else "aximum"
        none = -sign * float("inf")
        wanted = sign * cast("float", value)
        inclusive = sign * self._number(f"m{edge}", none)
        exclusive = sign * self._number(f"exclusiveM{edge}", none)
        strict = keyword.startswith("exclusive")
        held = exclusive >= wanted or (inclusive > wanted if strict else inclusive >= wanted)
        if "integer" in self._shape.types and not held:
            raise self._no(f"is not proven to keep {keyword}")

    def equal(self, keyword: str, kind: str, value: object) -> None:
        known = self._shape.limits.get(keyword)
        if kind in self._shape.types and _ENCODER.encode(known) != _ENCODER.encode(value):
            raise self._no(f"is not proven to keep {keyword}")


_RULES: Final[dict[str, Callable[[_Comparison, object], None]]] = {
    "$ref": _Comparison.reference,
    "type": _Comparison.type,
    "const": _Comparison.values,
    "enum": _Comparison.values,
    "properties": _Comparison.properties,
    "additionalProperties": _Comparison.additional,
    "required": _Comparison.required,
    "items": _Comparison.items,
    "allOf": _Comparison.all_of,
    "anyOf": _Comparison.any_of,
    "format": _Comparison.format,
    "uniqueItems": _Comparison.unique,
    "minItems": lambda self, value: self.at_least("minItems", "array", value),
    "maxItems": lambda self, value: self.at_most("maxItems", "array", value),
    "minLength": lambda self, value: self.at_least("minLength", "string", value),
    "maxLength": lambda self, value: self.at_most("maxLength", "string", value),
    "minProperties": lambda self, value: self.at_least("minProperties", "object", value),
    "maxProperties": lambda self, value: self.at_most("maxProperties", "object", value),
    "minimum": lambda self, value: self.bound("minimum", value),
    "maximum": lambda self, value: self.bound("maximum", value),
    "exclusiveMinimum": lambda self, value: self.bound("exclusiveMinimum", value),
    "exclusiveMaximum": lambda self, value: self.bound("exclusiveMaximum", value),
    "pattern": lambda self, value: self.equal("pattern", "string", value),
    "multipleOf": lambda self, value: self.equal("multipleOf", "integer", value),
}
