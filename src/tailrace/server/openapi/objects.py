"""Objects and arrays in JSON Schema."""

from __future__ import annotations

from tailrace.server.openapi.values import COUNT, COUNT_TEXT, Json


def obj(required: dict[str, Json], optional: dict[str, Json] | None = None, **more: object) -> Json:
    """An object; what it has beyond the named keys is left open unless `more` closes it."""
    shape: Json = {"type": "object", "properties": {**required, **(optional or {})}, **more}
    if required:
        shape["required"] = sorted(required)
    return shape


def closed(required: dict[str, Json], optional: dict[str, Json] | None = None, **more: object) -> Json:
    """An object of a request: unknown keys are refused."""
    return obj(required, optional, additionalProperties=False, **more)


def array(items: Json, **more: object) -> Json:
    return {"type": "array", "items": items, **more}


def counts(*names: str) -> dict[str, Json]:
    return dict.fromkeys(names, COUNT)


def texts(*names: str) -> dict[str, Json]:
    return dict.fromkeys(names, COUNT_TEXT)
