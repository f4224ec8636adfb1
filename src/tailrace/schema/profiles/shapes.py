"""Schemas of the canonical registries, written down briefly."""

from __future__ import annotations

from typing import Final

Json = dict[str, object]

TEXT_OR_NULL: Final[Json] = {"type": ["string", "null"]}
TEXTS: Final[Json] = {"type": "array", "items": {"type": "string"}}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
INSTANT: Final[Json] = {"type": "string", "format": "date-time"}


def closed_object(properties: Json, optional: Json | None = None) -> Json:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties | (optional or {}),
        "required": list(properties),
    }
