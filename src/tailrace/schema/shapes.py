"""What is known of the values at a place: an approximation from above of what a schema lets through.

A shape never leaves out a value that the schema allows, so whatever holds for a shape holds for the records.
Keywords that are not understood only widen it. Parts of a schema are looked at when they are needed, which
is how recursive schemas stay finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from tailrace.schema.convert import json_type
from tailrace.schema.documents import SchemaDocument, SchemaPath

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
    """The values at one place. `others` and `items` are None where anything may be."""

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
        self.values: list[object] | None = None  # all there can be, if that is known
        self.props: dict[str, ValueShape] = {}
        self.required: set[str] = set()
        self.others: ValueShape | None = None  # properties that are not in `props`
        self.items: ValueShape | None = None
        self.limits: dict[str, object] = {}
        self.made_by: int | None = None  # the operation that put it where it is
        self.place: tuple[SchemaDocument, SchemaPath] | None = (
            None  # where it is described, while that is the truth
        )
        self._pending = False

    @staticmethod
    def at(document: SchemaDocument, path: SchemaPath) -> ValueShape:
        shape = ValueShape()
        shape.place = (document, path)
        shape._pending = True
        return shape

    @staticmethod
    def of(values: Sequence[object]) -> ValueShape:
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
        """Looks at the schema, if that was not done yet."""
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
            return  # nothing else could say more
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
                self.props[name] = ValueShape.of([value[name] for value in objects if name in value])
            self.required = {name for name in self.props if all(name in value for value in objects)}
            self.others = NO_SHAPE
        elif self.types == frozenset({"array"}):
            arrays = cast("list[list[object]]", values)
            self.items = ValueShape.of([item for array in arrays for item in array])
            self.limits = {"minItems": min(map(len, arrays)), "maxItems": max(map(len, arrays))}

    def touch(self) -> None:
        """What is inside is about to change: what was said of the whole no longer holds."""
        self.open()
        self.values = None
        self.place = None
        self.limits = {key: value for key, value in self.limits.items() if key in ("minItems", "maxItems")}

    def prop(self, name: str) -> ValueShape:
        """The shape of a property, made the object's own so that it can be changed."""
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
    """An integer is a number, not the reverse."""
    return frozenset({"integer", "number"}) if kind == "number" else frozenset({kind})


def _object(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


ANY_SHAPE: Final = ValueShape()
NO_SHAPE: Final = ValueShape(frozenset[str]())
