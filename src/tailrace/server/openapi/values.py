"""Single values in JSON Schema, by the names that every page of the description uses."""

from __future__ import annotations

from typing import Final

Json = dict[str, object]

STRING: Final[Json] = {"type": "string"}
BOOLEAN: Final[Json] = {"type": "boolean"}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
# Numbers that may outgrow what scripts can hold travel as text.
COUNT_TEXT: Final[Json] = {"type": "string", "pattern": "^(-1|[0-9]+)$"}
TRUE: Final[Json] = {"const": "true"}
INSTANT: Final[Json] = {"type": "string", "format": "date-time"}
OBJECT: Final[Json] = {"type": "object"}


def nullable(shape: Json) -> Json:
    return {**shape, "type": [shape["type"], "null"]}
