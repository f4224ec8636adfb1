"""Normalisation helpers of profiles: numbers, trimmed text, and redaction of secrets before storage."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from typing import Final, cast

INTEGER_MAX: Final = 2**63 - 1


def to_trimmed(value: object) -> str | None:
    """A text without the space around it; None if nothing is left, or if it is no text."""
    return (value.strip() or None) if type(value) is str else None


def to_number(value: object) -> int | float | None:
    """A number that a double can hold; truth values are none."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int and -1.7e308 < value < 1.7e308:
        return value
    return None


def to_integer(value: object) -> int | None:
    """A number without a fraction, however it is written, that 64 bits can hold."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX:
        return value
    return None


REDACTED: Final = "[REDACTED]"
PATHS_MAX: Final = 1000  # listed; what is beyond is replaced all the same
PATH_CHARACTERS_MAX: Final = 1000
KEYS_CACHED_MAX: Final = 4096
KEY_CHARACTERS_CACHED_MAX: Final = 100

_CONTAINERS: Final = frozenset({dict, list})

KeyPath = tuple["KeyPath | None", str]  # the place around it, and its own key


class SecretKeys:
    """Which keys name secrets, in any case; `names` are in lower case. Records have the same few keys."""

    __slots__ = ("harmless", "names")

    def __init__(self, names: AbstractSet[str]) -> None:
        self.names = names
        self.harmless: set[str] = set()  # keys that were seen and name no secret

    def __contains__(self, key: str) -> bool:
        if key.lower() in self.names:
            return True
        if len(self.harmless) < KEYS_CACHED_MAX and len(key) <= KEY_CHARACTERS_CACHED_MAX:
            self.harmless.add(key)
        return False


def redact(value: dict[str, object] | list[object], secrets: SecretKeys, prefix: str = "") -> list[str]:
    """Replaces the values of secret keys at any depth, in place; the dotted paths of what was replaced.

    Nesting is as deep as a client likes, so this does not call itself.
    """
    found: list[str] = []
    open_: list[tuple[object, KeyPath | None]] = [(value, (None, prefix) if prefix else None)]
    while open_:
        container, place = open_.pop()
        if type(container) is list:
            items = cast("list[object]", container)
            if not _CONTAINERS.isdisjoint(map(type, items)):
                for index, item in enumerate(items):
                    if type(item) in _CONTAINERS:
                        open_.append((item, (place, str(index))))
            continue
        members = cast("dict[str, object]", container)
        # Fast path: usually all keys are known and all values are plain.
        if not secrets.harmless.issuperset(members):
            for key in members:
                if key in secrets:
                    members[key] = REDACTED
                    if len(found) < PATHS_MAX:
                        found.append(_dotted_path((place, key)))
        if not _CONTAINERS.isdisjoint(map(type, members.values())):
            for key, item in members.items():
                if type(item) in _CONTAINERS:
                    open_.append((item, (place, key)))
    if len(found) > 1:
        found.sort()
    return found


def _dotted_path(place: KeyPath) -> str:
    keys: list[str] = []
    step: KeyPath | None = place
    while step is not None:
        step, key = step
        keys.append(key[:PATH_CHARACTERS_MAX])
    return ".".join(reversed(keys))[:PATH_CHARACTERS_MAX]
