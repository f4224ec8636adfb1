"""The shape of request bodies: each check names the path that breaks it."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from tailrace.common.errors import TailraceError

SHOWN_MAX = 100  # characters of a client's own text in a message


def invalid_request(message: str) -> TailraceError:
    return TailraceError("invalid_request", message)


def shorten(text: str) -> str:
    """A client's text as far as it fits a message; what cannot be written as UTF-8 is replaced."""
    return text[:SHOWN_MAX].encode("utf-8", "replace").decode()


def expect_object(value: object, path: str, allowed: Collection[str] | None = None) -> dict[str, object]:
    """A JSON object, with no keys but the allowed ones."""
    if not isinstance(value, dict):
        raise invalid_request(f"{path} must be an object")
    given = cast("dict[str, object]", value)
    if allowed is not None:
        for key in given:
            if key not in allowed:
                raise invalid_request(f"{path}.{shorten(key)} is not supported")
    return given


def expect_array(value: object, path: str, length_max: int) -> list[object]:
    if not isinstance(value, list):
        raise invalid_request(f"{path} must be an array")
    items = cast("list[object]", value)
    if len(items) > length_max:
        raise invalid_request(f"{path} must have at most {length_max} items")
    return items


def expect_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise invalid_request(f"{path} must be a string")
    return value


def expect_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise invalid_request(f"{path} must be a boolean")
    return value
