"""Two versions of a schema, and the lens operation between them: `ts` is renamed to `at`."""

from __future__ import annotations

from typing import Any, Final

V1: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"ts": {"type": "string"}},
    "required": ["ts"],
    "additionalProperties": False,
}
V2: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}
RENAME: Final[dict[str, Any]] = {"op": "rename", "from": "/ts", "to": "/at"}
