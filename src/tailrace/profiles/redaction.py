"""Secrets leave a record before anybody stores it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final, cast

REDACTED: Final = "[REDACTED]"
PATHS_MAX: Final = 1000  # listed; what is beyond is replaced all the same
PATH_CHARACTERS_MAX: Final = 1000

Place = tuple["Place | None", str]  # the place around it, and its own key


def redact(value: dict[str, object] | list[object], secrets: AbstractSet[str], prefix: str = "") -> list[str]:
    """Replaces the values of secret keys at any depth, in place; the dotted paths of what was replaced.

    `secrets` are in lower case. Nesting is as deep as a client likes, so this does not call itself.
    """
    found: list[str] = []
    open_: list[tuple[object, Place | None]] = [(value, (None, prefix) if prefix else None)]
    while open_:
        container, place = open_.pop()
        if type(container) is list:
            for index, item in enumerate(cast("list[object]", container)):
                if type(item) is dict or type(item) is list:
                    open_.append((cast("object", item), (place, str(index))))
            continue
        members = cast("dict[str, object]", container)
        for key, item in members.items():
            if key.lower() in secrets:
                members[key] = REDACTED
                if len(found) < PATHS_MAX:
                    found.append(_path((place, key)))
            elif type(item) is dict or type(item) is list:
                open_.append((cast("object", item), (place, key)))
    if len(found) > 1:
        found.sort()
    return found


def _path(place: Place) -> str:
    keys: list[str] = []
    step: Place | None = place
    while step is not None:
        step, key = step
        keys.append(key[:PATH_CHARACTERS_MAX])
    return ".".join(reversed(keys))[:PATH_CHARACTERS_MAX]
