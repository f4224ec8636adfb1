"""Slice tags and their comparison."""

from __future__ import annotations

from urllib.parse import quote


def slice_etag(
    start: str, following: str, key: str, fmt: str, filter_text: str, closed: bool, mark: str = ""
) -> str:
    """The weak tag of the slice `(start, following]`; closing alone changes it.

    The mark stands for whatever else the bytes depend on, such as the stream's schema registry.
    """
    tail = ":closed" if closed else ""
    known = f":schema={mark}" if mark else ""
    key, filter_text = quote(key, safe=""), quote(filter_text, safe="")
    return f'W/"slice:{start}:{following}:key={key}:fmt={fmt}{known}:filter={filter_text}{tail}"'


def if_none_match(header: str, tag: str) -> bool:
    """Whether `If-None-Match` names the tag: weak comparison, lists and `*`."""
    if header.strip() == "*":
        return True
    opaque = tag.removeprefix("W/")
    return any(item.strip().removeprefix("W/") == opaque for item in header.split(","))


def slice_etag_format(tag: str) -> str:
    """The form of a slice's body, also where none was asked for; empty if the tag is not one of ours."""
    return tag.partition(":fmt=")[2].partition(":")[0] if slice_etag_start(tag) else ""


def slice_etag_start(tag: str) -> str:
    """Where the slice of a tag begins; empty if it is not one of ours."""
    parts = tag.removeprefix("W/").strip('"').split(":", 3)
    return parts[1] if len(parts) == 4 and parts[0] == "slice" else ""
