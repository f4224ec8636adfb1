"""Stream names: decoding from a URL path, validation, reserved names, and glob patterns over segments."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from tailrace.common.errors import TailraceError

RESERVED_LAST_SEGMENTS = frozenset(
    {"_schema", "_profile", "_search", "_aggregate", "_routing_keys", "_index_status", "_details", "_otlp"}
)
RESERVED_INNER_SEGMENTS = frozenset({"pk", "touch", "_otlp"})


def decode_name(raw: bytes) -> str | None:
    """A name from its percent-encoded path; None if the bytes are not UTF-8. `%2F` is a slash."""
    try:
        if b"%" not in raw:
            return raw.decode()
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        return None


def is_valid_name(name: str, bytes_max: int) -> bool:
    if not name or len(name.encode()) > bytes_max or not _is_printable(name):
        return False
    return all(segment not in ("", ".", "..") for segment in name.split("/"))


def is_system_name(name: str) -> bool:
    """Whether the server owns the stream; only the server writes it."""
    return name.startswith("__")


def is_sub_resource_name(name: str) -> bool:
    """Whether the path is a sub-resource of a stream rather than a stream."""
    segments = name.split("/")
    return segments[-1] in RESERVED_LAST_SEGMENTS or any(
        segment in RESERVED_INNER_SEGMENTS for segment in segments[1:-1]
    )


def check_creatable_name(name: str | None, bytes_max: int) -> str:
    """Reject invalid and reserved names, so that every created stream can be reached."""
    if name is None or not is_valid_name(name, bytes_max):
        raise TailraceError(
            "invalid_name",
            f"a stream name must be 1 to {bytes_max} bytes of UTF-8 without control characters and without "
            "empty, '.' or '..' segments",
        )
    first = name.partition("/")[0]
    if first.startswith("__") or first == "hub" or is_sub_resource_name(name):
        raise TailraceError("reserved_name", f"the name {name!r} is reserved")
    return name


def _is_printable(name: str) -> bool:
    return not any(char < " " or "\x7f" <= char <= "\x9f" for char in name)


class NamePattern:
    """A compiled glob over segments: `*` is exactly one, `**` zero or more, all others are literal."""

    __slots__ = ("_segments", "prefix", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._segments = text.split("/")
        self.prefix = literal_prefix(text)

    def matches(self, name: str) -> bool:
        """Whether the glob matches the name. System and hub streams are only matched by exact name."""
        if not name.startswith(self.prefix) or name.startswith(("__", "hub/")):
            return False
        return _match_segments(self._segments, name.split("/"))


def literal_prefix(pattern: str) -> str:
    """The common prefix of all matching names, where the scan for existing streams starts.

    `a/**` also matches `a`, so the slash before a `**` is not part of it.
    """
    literal: list[str] = []
    for segment in pattern.split("/"):
        if segment in ("*", "**"):
            return "/".join(literal) + ("/" if literal and segment == "*" else "")
        literal.append(segment)
    return pattern


def _match_segments(pattern: list[str], name: list[str]) -> bool:
    """Greedy with one backtracking point: the latest `**` can compensate for all earlier ones."""
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
