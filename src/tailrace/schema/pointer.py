"""JSON pointers (RFC 6901): parsed once, followed often."""

from __future__ import annotations

import re
from typing import Final, cast

_TOKEN = re.compile(r"(?:[^~/]|~0|~1)*+")  # possessive: `re` keeps no state for each repetition
_INDEX = re.compile(r"0|[1-9][0-9]*")


class Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()  # what a pointer finds where nothing is; a JSON null is a value


def parse_pointer(text: str) -> tuple[str, ...] | None:
    """The tokens of a pointer, unescaped; `""` is the root. None if the text is no pointer."""
    if not text:
        return ()
    if text[0] != "/":
        return None
    tokens = text[1:].split("/")
    if not all(_TOKEN.fullmatch(token) for token in tokens):
        return None
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in tokens)


def resolve_pointer(value: object, tokens: tuple[str, ...]) -> object:
    """What lies at the pointer, or `ABSENT`."""
    for token in tokens:
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get(token, ABSENT)
        elif isinstance(value, list):
            items = cast("list[object]", value)
            # Longer than any array could be: no need to make a number of it.
            if len(token) > 18 or not _INDEX.fullmatch(token) or int(token) >= len(items):
                return ABSENT
            value = items[int(token)]
        else:
            return ABSENT
    return value
