"""Slice tags and their comparison."""

from __future__ import annotations

from urllib.parse import quote


def slice_tag(start: str, following: str, key: str, fmt: str, filter_text: str, closed: bool) -> str:
    """The weak tag of the slice `(start, following]`; closing alone changes it."""
    tail = ":closed" if closed else ""
    return f'W/"slice:{start}:{following}:key={quote(key, safe="")}:fmt={fmt}:filter={quote(filter_text, safe="")}{tail}"'


def none_match(header: str, tag: str) -> bool:
    """Whether `If-None-Match` names the tag: weak comparison, lists and `*`."""
    if header.strip() == "*":
        return True
    opaque = tag.removeprefix("W/")
    return any(item.strip().removeprefix("W/") == opaque for item in header.split(","))
