"""Conversions of single values, as lenses use them."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from tailrace.schema.pointer import ABSENT
from tailrace.schema.timestamps import from_unix_ms, to_unix_ms

TYPES: Final = frozenset({"string", "integer", "number", "boolean", "null"})
_INTEGER = re.compile(r"-?[0-9]{1,1000}")


class LensFailureError(Exception):
    """A record that a lens cannot be applied to; the text says why."""


class Conversion(Struct, frozen=True):
    """A table of values by their text, or one of the built-in functions."""

    table: dict[str, object] | None = None
    default: object = ABSENT
    builtin: str = ""

    def run(self, value: object) -> object:
        if self.table is None:
            return _BUILTINS[self.builtin](value)
        found = self.table.get(value_text(value), self.default)
        if found is ABSENT:
            raise LensFailureError("the value is not in the map, which has no default")
        return found

    def results(self) -> list[object] | None:
        """Everything that can come out, if that is known."""
        if self.table is None or self.default is ABSENT:
            return None
        return [*self.table.values(), self.default]


def json_type(value: object) -> str:
    """The JSON type; a number without a fraction is an integer, however it is written."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def has_type(value: object, wanted: str) -> bool:
    found = json_type(value)
    return found == wanted or (wanted == "number" and found == "integer")


def value_text(value: object) -> str:
    """The key of a value in a map: strings as they are, numbers in their shortest form."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e21:
            return str(int(value))
        return repr(value).replace("e+", "e")
    return str(value)


def _lowercase(value: object) -> str:
    return _text(value).lower()


def _uppercase(value: object) -> str:
    return _text(value).upper()


def _string_to_int(value: object) -> int:
    text = _text(value)
    if not _INTEGER.fullmatch(text):
        raise LensFailureError("the text is no integer")
    return int(text)


def _int_to_string(value: object) -> str:
    return str(_integer(value))


def _to_unix_millis(value: object) -> int:
    found = to_unix_ms(_text(value))
    if found is None:
        raise LensFailureError("the text is no RFC 3339 instant")
    return found


def _from_unix_millis(value: object) -> str:
    return from_unix_ms(_integer(value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise LensFailureError("the value is no string")
    return value


def _integer(value: object) -> int:
    if json_type(value) != "integer":
        raise LensFailureError("the value is no integer")
    assert isinstance(value, int | float)
    return int(value)


_BUILTINS = {
    "lowercase": _lowercase,
    "uppercase": _uppercase,
    "string_to_int": _string_to_int,
    "int_to_string": _int_to_string,
    "rfc3339_to_unix_millis": _to_unix_millis,
    "unix_millis_to_rfc3339": _from_unix_millis,
}
BUILTINS: Final = frozenset(_BUILTINS)
# What a function takes and gives; those that are not total may still fail on a value of their type.
INPUT_TYPES: Final = {
    name: "integer" if name in ("int_to_string", "unix_millis_to_rfc3339") else "string" for name in BUILTINS
}
OUTPUT_TYPES: Final = {
    name: "integer" if name in ("string_to_int", "rfc3339_to_unix_millis") else "string" for name in BUILTINS
}
PARTIAL: Final = frozenset({"string_to_int", "rfc3339_to_unix_millis"})
