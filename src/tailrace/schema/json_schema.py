"""JSON Schema: checks of schema documents at installation, and validation of records at append.

Nothing is ever fetched: a reference out of its document is rejected. The validator is jsonschema-rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, cast
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema_rs
import msgspec

from tailrace.common.timestamps import is_date_time
from tailrace.schema.json_values import (
    ABSENT,
    invalid_request,
    parse_pointer,
    resolve_pointer,
    shorten,
    without_surrogates,
)

SCHEMA_BYTES_MAX: Final = 1024 * 1024
DEPTH_MAX: Final = 64

DRAFT_2020: Final = "https://json-schema.org/draft/2020-12/schema"
DRAFT_7: Final = "http://json-schema.org/draft-07/schema"

# Keywords whose values are data, not schemas; and those whose values are schemas by name.
_DATA: Final = frozenset({"enum", "const", "default", "examples"})
_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)

SchemaPath = tuple[str, ...]


class SchemaDocument:
    """A schema with its references resolved to paths in it."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.is_draft_7 = _is_draft_7(root)
        self._resources: dict[str, SchemaPath] = {"": ()}  # by absolute URI, anchors with their fragment
        self._references: dict[SchemaPath, tuple[str, str]] = {}  # base and text of every `$ref`
        self._walk(root, (), "")
        for base, text in self._references.values():
            if urldefrag(_joined(base, text)).url not in self._resources:
                raise invalid_request("external $ref is not supported")

    def _walk(self, node: object, path: SchemaPath, base: str) -> None:
        if not isinstance(node, dict):
            return
        schema = cast("dict[str, object]", node)
        named = schema.get("$id")
        if isinstance(named, str) and not (self.is_draft_7 and "$ref" in schema):
            base = _joined(base, named)
            if not named.startswith("#"):
                base = urldefrag(base).url
            self._resources.setdefault(base, path)
            base = urldefrag(base).url
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._resources.setdefault(f"{base}#{anchor}", path)
        _is_draft_7(schema)
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(text := schema.get(keyword), str):
                self._references[(*path, keyword)] = (base, text)
        for place, child in iterate_subschemas(schema):
            self._walk(child, (*path, *place), base)

    def node(self, path: SchemaPath) -> object:
        return resolve_pointer(self.root, path)

    def target(self, path: SchemaPath) -> SchemaPath | None:
        """The target of the `$ref` at this path; None if it cannot be resolved to a path."""
        base, text = self._references[(*path, "$ref")]
        uri, fragment = urldefrag(_joined(base, text))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._resources.get(f"{uri}#{fragment}")
        home = self._resources.get(uri)
        tokens = parse_pointer(fragment)
        if home is None or tokens is None or resolve_pointer(self.root, (*home, *tokens)) is ABSENT:
            return None
        return (*home, *tokens)


def _joined(base: str, text: str) -> str:
    try:
        return urljoin(base, text)
    except ValueError:
        raise invalid_request("external $ref is not supported") from None  # not a valid URI


def iterate_subschemas(schema: dict[str, object]) -> Iterator[tuple[SchemaPath, object]]:
    """All subschemas, also below unknown keywords, because a reference may lead there."""
    for keyword, value in schema.items():
        if keyword in _DATA:
            continue
        if isinstance(value, dict):
            items = cast("dict[str, object]", value)
            if keyword in _MAPS:
                yield from (((keyword, name), child) for name, child in items.items())
            else:
                yield (keyword,), items
        elif isinstance(value, list):
            listed = cast("list[object]", value)
            yield from (((keyword, str(index)), child) for index, child in enumerate(listed))


def _is_draft_7(schema: object) -> bool:
    """Which of the two supported dialects a schema has; others are rejected."""
    dialect = cast("dict[str, object]", schema).get("$schema", DRAFT_2020) if isinstance(schema, dict) else ""
    if dialect == "":
        return False
    if not isinstance(dialect, str):
        raise invalid_request("invalid schema: /$schema must be a string")
    known = dialect.removesuffix("#")
    if known not in (DRAFT_2020, DRAFT_7):
        raise invalid_request(f"unsupported $schema {shorten(dialect)}")
    return known == DRAFT_7


def nesting_depth(value: object) -> int:
    """The nesting depth of containers."""
    deepest = 0
    level: list[object] = [value]
    while level:
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(cast("dict[str, object]", item).values())
            elif isinstance(item, list):
                inner.extend(cast("list[object]", item))
        containers = any(isinstance(item, dict | list) for item in level)
        deepest += containers
        level = inner
    return deepest


ERRORS_SHOWN: Final = 5
REASON_CHARACTERS_MAX: Final = 200


def _annotation(_: str) -> bool:
    return True


# `date-time` is asserted; every other format is an annotation.
_ANNOTATIONS = (
    "date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uri-template uuid json-pointer relative-json-pointer regex"
)
_FORMATS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(_ANNOTATIONS.split(), _annotation),
    "date-time": is_date_time,
}
_LINEAR_REGEX = jsonschema_rs.RegexOptions()


class Validator:
    """A compiled schema."""

    __slots__ = ("_compiled",)

    def __init__(self, compiled: jsonschema_rs.Validator) -> None:
        self._compiled = compiled

    def accepts(self, value: object) -> bool:
        try:
            return self._compiled.is_valid(value)
        except UnicodeEncodeError:
            return self._compiled.is_valid(without_surrogates(value))

    def complaint(self, value: object) -> str | None:
        """The first few validation errors of a value; None if it is valid."""
        try:
            if self._compiled.is_valid(value):
                return None
            found = list(islice(self._compiled.iter_errors(value), ERRORS_SHOWN))
        except UnicodeEncodeError:
            return self.complaint(without_surrogates(value))
        return "; ".join(f"{_error_path(error)} {_error_reason(error)}" for error in found)


def compile_schema(schema: object) -> Validator:
    """Compile a schema for records; raises for an invalid one."""
    return Validator(_compile(SchemaDocument(schema).root))


def check_schema(schema: object) -> SchemaDocument:
    """Check a schema from a request: size, depth, dialect, references, and that it compiles."""
    if not isinstance(schema, dict | bool):
        raise invalid_request("invalid schema: must be an object or a boolean")
    if nesting_depth(cast("object", schema)) > DEPTH_MAX:
        raise invalid_request(f"schema is nested deeper than {DEPTH_MAX} levels")
    if len(msgspec.json.encode(schema)) > SCHEMA_BYTES_MAX:
        raise invalid_request(f"schema is larger than {SCHEMA_BYTES_MAX} bytes")
    document = SchemaDocument(cast("object", schema))
    _compile(document.root)
    return document


def _compile(schema: object) -> jsonschema_rs.Validator:
    try:
        return jsonschema_rs.validator_for(
            cast("dict[str, object]", schema),
            formats=_FORMATS,
            validate_formats=True,
            mask="value",
            pattern_options=_LINEAR_REGEX,
            offline=True,
        )
    except jsonschema_rs.ValidationError as error:
        path = error.instance_path
        if error.message.endswith('is not a "regex"') and _is_pattern(path):
            where = ".".join(str(part) for part in path)
            raise invalid_request(f"schema.{shorten(where)}: pattern not supported") from None
        raise invalid_request(f"invalid schema: {_error_path(error)} {_error_reason(error)}") from None
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        raise invalid_request(f"invalid schema: {shorten(str(error))}") from None


def compile_subschemas(document: SchemaDocument) -> jsonschema_rs.ValidatorMap:
    """A validator for each subschema of a document."""
    return jsonschema_rs.validator_map_for(
        cast("dict[str, object]", document.root),
        formats=_FORMATS,
        validate_formats=True,
        pattern_options=_LINEAR_REGEX,
        offline=True,
    )


def _is_pattern(path: list[str | int]) -> bool:
    return path[-1:] == ["pattern"] or path[-2:-1] == ["patternProperties"]


def _error_path(error: jsonschema_rs.ValidationError) -> str:
    if not error.instance_path:
        return "(root)"
    tokens = (str(token).replace("~", "~0").replace("/", "~1") for token in error.instance_path)
    return shorten("/" + "/".join(tokens))


def _error_reason(error: jsonschema_rs.ValidationError) -> str:
    return error.message[:REASON_CHARACTERS_MAX]
