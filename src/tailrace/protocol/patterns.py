"""Globs over the segments of stream names: `*` is exactly one segment, `**` zero or more."""

from __future__ import annotations


class NamePattern:
    """A compiled glob over segments: `*` is exactly one, `**` zero or more, everything else is literal."""

    __slots__ = ("_segments", "prefix", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._segments = text.split("/")
        self.prefix = literal_prefix(text)

    def matches(self, name: str) -> bool:
        """Whether the glob covers the name. Streams of the server are linked by name or not at all."""
        if not name.startswith(self.prefix) or name.startswith(("__", "hub/")):
            return False
        return _match_segments(self._segments, name.split("/"))


def literal_prefix(pattern: str) -> str:
    """What every matching name starts with: the scan for existing streams begins there.

    `a/**` also matches `a`, so the slash before a `**` is not part of it.
    """
    literal: list[str] = []
    for segment in pattern.split("/"):
        if segment in ("*", "**"):
            return "/".join(literal) + ("/" if literal and segment == "*" else "")
        literal.append(segment)
    return pattern


def _match_segments(pattern: list[str], name: list[str]) -> bool:
    """Greedy, with one point to come back to: the latest `**` can make up for all earlier ones."""
    at = seen = 0
    star = retry = -1
    while seen < len(name):
        if at < len(pattern) and pattern[at] == "**":
            star, retry = at, seen
            at += 1
        elif at < len(pattern) and pattern[at] in ("*", name[seen]):
            at += 1
            seen += 1
        elif star >= 0:
            retry += 1
            at, seen = star + 1, retry
        else:
            return False
    return all(segment == "**" for segment in pattern[at:])
