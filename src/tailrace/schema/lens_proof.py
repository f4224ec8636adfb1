"""Proves at installation that a lens turns every record of the old version into a valid one of the new.

The operations run on the shape of the old schema instead of on records. If an operation could fail on some
record, or the result could be invalid under the new schema, the lens is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, cast

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.schema.compatibility import NO_SHAPE, AcceptanceCheck, UnprovenError, ValueShape
from tailrace.schema.json_schema import SchemaDocument, SchemaPath, compile_schema
from tailrace.schema.json_values import ABSENT, invalid_request
from tailrace.schema.lenses import (
    INPUT_TYPES,
    OUTPUT_TYPES,
    PARTIAL,
    LensFailureError,
    LensOp,
    PointerTokens,
    convert_value,
    format_pointer,
    has_type,
)


def prove_lens(ops: tuple[LensOp, ...], old: SchemaDocument, new: SchemaDocument) -> None:
    """Reject a lens that cannot be proven. Its defaults are resolved already."""
    try:
        shape = _ProofRun().all(ops, ValueShape.at(old, ()))
        _check_declared(new, (), shape, ())
        AcceptanceCheck(new).check((), shape)
    except UnprovenError as unproven:
        index = len(ops) - 1 if unproven.made_by is None else unproven.made_by
        raise invalid_request(f"lens proof: {index} {unproven}") from None
    except RecursionError:
        raise invalid_request(f"lens proof: {len(ops) - 1} the schemas are too deep to decide") from None


def resolve_lens_defaults(
    ops: tuple[LensOp, ...], documents: list[object], outer: int | None = None
) -> tuple[LensOp, ...]:
    """Resolve the default of every `add`, also in the stored document of the lens."""
    resolved: list[LensOp] = []
    for position, (op, document) in enumerate(zip(ops, documents, strict=True)):
        index = position if outer is None else outer
        given = cast("dict[str, object]", document)
        if op.op == "add":
            given["default"] = default = _default_of(op, index)
            op = msgspec.structs.replace(op, default=default)
        elif op.ops:
            inner = resolve_lens_defaults(op.ops, cast("list[object]", given["ops"]), index)
            op = msgspec.structs.replace(op, ops=inner)
        resolved.append(op)
    return tuple(resolved)


def _default_of(op: LensOp, index: int) -> object:
    whole = op.schema
    schema: dict[str, object] = cast("dict[str, object]", whole) if isinstance(whole, dict) else {}
    default = op.default if op.default is not ABSENT else schema.get("default", ABSENT)
    if default is ABSENT:
        empty: dict[object, object] = {"object": {}, "array": []}
        named = schema.get("type")
        default = empty.get(named, ABSENT) if isinstance(named, str) else ABSENT
    if default is ABSENT:
        raise invalid_request(f"lens proof: {index} add needs a default")
    try:
        validator = compile_schema(cast("object", whole))
    except TailraceError as error:
        raise invalid_request(f"lens proof: {index} {error.message}") from None
    if not validator.accepts(default):
        raise invalid_request(f"lens proof: {index} the default does not match the schema of the operation")
    return default


class _ProofRun:
    """One pass over the operations; `index` is that of the current outermost operation."""

    def __init__(self) -> None:
        self.index = 0
        self._depth = 0

    def all(self, ops: tuple[LensOp, ...], root: ValueShape) -> ValueShape:
        outermost = self._depth == 0
        self._depth += 1
        for index, op in enumerate(ops):
            if outermost:
                self.index = index
            root = _STEPS[op.op](self, op, root)
        self._depth -= 1
        return root

    def fail(self, reason: str) -> NoReturn:
        raise UnprovenError(reason, self.index)

    # -- places ----------------------------------------------------------------------------------------

    def need(self, root: ValueShape, tokens: PointerTokens) -> ValueShape:
        """The shape at a pointer that every record must have."""
        shape = root
        for depth, token in enumerate(tokens):
            if shape.only("array"):
                least = shape.limits.get("minItems", 0)
                inside = token.isdecimal() and isinstance(least, int | float) and int(token) < least
                if not inside:
                    self.fail(f"{format_pointer(tokens[: depth + 1])} is not in every record")
                shape = ValueShape() if shape.items is None else shape.items
                continue
            if not shape.only("object"):
                self.fail(f"{format_pointer(tokens[:depth])} is not an object in every record")
            if token not in shape.required:
                self.fail(f"{format_pointer(tokens[: depth + 1])} is not required by the old schema")
            shape = shape.prop(token)
        return shape.open()

    def objects_on(self, root: ValueShape, tokens: PointerTokens) -> list[ValueShape]:
        """The required objects on the path to a pointer, from the root to its parent."""
        way: list[ValueShape] = []
        for depth in range(len(tokens)):
            parent = self.need(root, tokens[:depth])
            if not parent.only("object"):
                what = "is not a required object" if not parent.only("array") else "is an array; use map"
                self.fail(f"{format_pointer(tokens[:depth])} {what}")
            way.append(parent)
        return way

    def replace(self, root: ValueShape, tokens: PointerTokens, shape: ValueShape) -> ValueShape:
        """The root with another shape at a pointer whose parents exist."""
        shape.made_by = self.index
        if not tokens:
            return shape
        way = self.objects_on(root, tokens)
        for parent in way:
            parent.touch()
        way[-1].props[tokens[-1]] = shape
        way[-1].required.add(tokens[-1])
        return root

    def clear(self, root: ValueShape, tokens: PointerTokens) -> None:
        way = self.objects_on(root, tokens)
        for parent in way:
            parent.touch()
        gone = NO_SHAPE.clone()
        gone.made_by = self.index
        way[-1].props[tokens[-1]] = gone
        way[-1].required.discard(tokens[-1])

    # -- operations ------------------------------------------------------------------------------------

    def move(self, op: LensOp, root: ValueShape) -> ValueShape:
        shape = self.need(root, op.source).clone()
        if op.op == "rename" or (op.op == "hoist" and not op.keeps_source):
            self.clear(root, op.source)
        return self.replace(root, op.target, shape)

    def add(self, op: LensOp, root: ValueShape) -> ValueShape:
        return self.replace(root, op.target, ValueShape.from_values([op.default]))

    def remove(self, op: LensOp, root: ValueShape) -> ValueShape:
        self.need(root, op.source)
        self.clear(root, op.source)
        return root

    def plunge(self, op: LensOp, root: ValueShape) -> ValueShape:
        shape = self.need(root, op.source).clone()
        if not op.keeps_source:
            self.clear(root, op.source)
        if not op.creates_host:
            return self.replace(root, op.target, shape)
        host = root
        for depth, token in enumerate(op.target[:-1]):
            if not host.only("object"):
                self.fail(f"{format_pointer(op.target[:depth])} is not an object in every record")
            inner = host.prop(token)
            host.touch()
            if inner.never:
                inner = host.props[token] = ValueShape.from_values([{}])
            elif token not in host.required:
                # It may exist or be created; a created one is empty.
                inner.touch()
                inner.required = set()
            if not inner.only("object"):
                self.fail(f"{format_pointer(op.target[: depth + 1])} may be there and not be an object")
            inner.made_by = self.index
            host.required.add(token)
            host = inner
        return self.replace(root, op.target, shape)

    def wrap(self, op: LensOp, root: ValueShape) -> ValueShape:
        array = ValueShape(frozenset({"array"}))
        array.items = self.need(root, op.source).clone()
        array.limits = {"minItems": 1, "maxItems": 1}
        return self.replace(root, op.source, array)

    def head(self, op: LensOp, root: ValueShape) -> ValueShape:
        array = self.need(root, op.source)
        least = array.limits.get("minItems", 0)
        if not array.only("array") or not isinstance(least, int | float) or least < 1:
            self.fail(f"{format_pointer(op.source)} is not a non-empty array in every record")
        if array.values is not None:
            arrays = cast("list[list[object]]", array.values)
            return self.replace(root, op.source, ValueShape.from_values([items[0] for items in arrays]))
        first = ValueShape() if array.items is None else array.items.clone()
        return self.replace(root, op.source, first)

    def convert(self, op: LensOp, root: ValueShape) -> ValueShape:
        source = self.need(root, op.source)
        if source.open().values is not None:
            return self.replace(root, op.source, self._converted(op, source.values or []))
        kinds = {"integer", "number"} if op.from_type == "number" else {op.from_type}
        if not source.types <= kinds:
            self.fail(f"{format_pointer(op.source)} is not of type {op.from_type} in every record")
        forward = op.forward
        if forward.table is None:
            if forward.builtin in PARTIAL:
                self.fail(
                    f"{forward.builtin} is not total: {format_pointer(op.source)} needs an enum or a const"
                )
            if op.from_type != INPUT_TYPES[forward.builtin]:
                self.fail(f"{forward.builtin} takes {INPUT_TYPES[forward.builtin]}, not {op.from_type}")
            if op.to_type != OUTPUT_TYPES[forward.builtin]:
                self.fail(f"{forward.builtin} gives {OUTPUT_TYPES[forward.builtin]}, not {op.to_type}")
            result = ValueShape(frozenset({OUTPUT_TYPES[forward.builtin]}))
            if forward.builtin == "unix_millis_to_rfc3339":
                result.limits = {"format": "date-time"}
            return self.replace(root, op.source, result)
        results = forward.results()
        if results is None:
            self.fail(
                f"a map without default is not total: {format_pointer(op.source)} needs an enum or a const"
            )
        if not all(has_type(value, op.to_type) for value in results):
            self.fail(f"the map gives values that are not of type {op.to_type}")
        return self.replace(root, op.source, ValueShape.from_values(results))

    def _converted(self, op: LensOp, values: list[object]) -> ValueShape:
        try:
            return ValueShape.from_values([convert_value(op, value) for value in values])
        except LensFailureError as failure:
            self.fail(str(failure))

    def inside(self, op: LensOp, root: ValueShape) -> ValueShape:
        inner = self.need(root, op.source)
        if not inner.only("object"):
            self.fail(f"{format_pointer(op.source)} is not an object in every record")
        return self.replace(root, op.source, self.all(op.ops, inner.clone()))

    def each(self, op: LensOp, root: ValueShape) -> ValueShape:
        array = self.need(root, op.source)
        if not array.only("array"):
            self.fail(f"{format_pointer(op.source)} is not an array in every record")
        mapped = array.clone()
        mapped.touch()
        items = ValueShape() if mapped.items is None else mapped.items
        mapped.items = items if items.never else self.all(op.ops, items)
        return self.replace(root, op.source, mapped)


_STEPS: dict[str, Callable[[_ProofRun, LensOp, ValueShape], ValueShape]] = {
    "rename": _ProofRun.move,
    "copy": _ProofRun.move,
    "hoist": _ProofRun.move,
    "add": _ProofRun.add,
    "remove": _ProofRun.remove,
    "plunge": _ProofRun.plunge,
    "wrap": _ProofRun.wrap,
    "head": _ProofRun.head,
    "convert": _ProofRun.convert,
    "in": _ProofRun.inside,
    "map": _ProofRun.each,
}


def _check_declared(
    new: SchemaDocument, path: SchemaPath | None, shape: ValueShape, at: PointerTokens
) -> None:
    """Every member that the lens writes must be declared in the new schema."""
    if shape.made_by is not None and path is None and not shape.never:
        raise UnprovenError(f"{format_pointer(at)} is not declared in the new schema", shape.made_by)
    if shape.place is not None:
        return  # unchanged by the lens
    path = _followed(new, path)
    for name, inner in shape.props.items():
        _check_declared(new, _child(new, path, "properties", name), inner, (*at, name))
    if shape.items is not None:
        _check_declared(new, _child(new, path, "items"), shape.items, (*at, "*"))


def _followed(new: SchemaDocument, path: SchemaPath | None) -> SchemaPath | None:
    for _ in range(100):
        node = None if path is None else new.node(path)
        if path is None or not isinstance(node, dict) or "$ref" not in node:
            return path
        path = new.target(path)
    return None


def _child(new: SchemaDocument, path: SchemaPath | None, *tokens: str) -> SchemaPath | None:
    if path is None or new.node((*path, *tokens)) is ABSENT:
        return None
    return (*path, *tokens)
