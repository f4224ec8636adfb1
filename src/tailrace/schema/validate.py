"""JSON Schema: documents checked at install, records checked at append. The validator is jsonschema-rs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final, cast

import jsonschema_rs
import msgspec

from tailrace.schema.body import invalid_request, shorten
from tailrace.schema.documents import DEPTH_MAX, SCHEMA_BYTES_MAX, SchemaDocument, nesting_depth
from tailrace.schema.record import without_surrogates
from tailrace.schema.timestamps import is_date_time

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
