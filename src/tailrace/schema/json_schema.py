"""JSON Schema documents: references, limits, compilation and validation of records.

JSON Schema documents as trees: where their subschemas are, and what their references mean.

Nothing is ever fetched: a reference that does not stay inside its document is refused.

JSON Schema: documents checked at install, records checked at append. The validator is jsonschema-rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, cast
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema_rs
import msgspec

from tailrace.schema.json_values import (
    ABSENT,
    invalid_request,
    parse_pointer,
    resolve_pointer,
    shorten,
    without_surrogates,
)
from tailrace.schema.timestamps import is_date_time

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
    """A schema with its references resolved to places in it."""

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
        """Where the `$ref` of the schema at this path leads; None if that is not a plain place."""
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
        raise invalid_request("external $ref is not supported") from None  # not even an address


def iterate_subschemas(schema: dict[str, object]) -> Iterator[tuple[SchemaPath, object]]:
    """Every subschema, those below unknown keywords included: a reference may lead there."""
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
    """Which of the two dialects a schema is written in; every other one is refused."""
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
    """How many containers lie inside one another."""
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


# `date-time` is asserted; every other format says something about a value and refuses none.
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
    """One schema, compiled."""

    __slots__ = ("_compiled",)

    def __init__(self, compiled: jsonschema_rs.Validator) -> None:
        self._compiled = compiled

    def accepts(self, value: object) -> bool:
        try:
            return self._compiled.is_valid(value)
        except UnicodeEncodeError:
            return self._compiled.is_valid(without_surrogates(value))

    def complaint(self, value: object) -> str | None:
        """What is wrong with the value, the first few things of it; None if nothing is."""
        try:
            if self._compiled.is_valid(value):
                return None
            found = list(islice(self._compiled.iter_errors(value), ERRORS_SHOWN))
        except UnicodeEncodeError:
            return self.complaint(without_surrogates(value))
        return "; ".join(f"{_error_path(error)} {_error_reason(error)}" for error in found)


def compile_schema(schema: object) -> Validator:
    """A schema for records, or the refusal it deserves."""
    return Validator(_compile(SchemaDocument(schema).root))


def check_schema(schema: object) -> SchemaDocument:
    """A schema from a request: bounded, of a known dialect, complete in itself, and one that compiles."""
    if not isinstance(schema, dict | bool):
        raise invalid_request("invalid schema: it must be an object or a boolean")
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
    """A validator for each place in a document that compiled."""
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
