"""Addresses of actors, the patterns that find them, topics and the filters that subscribe to them."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Final, Generic, TypeVar

from tailrace.hub.errors import field_error

ADDRESS_BYTES_MAX: Final = 256
SEGMENTS_MAX: Final = 8
PATTERN_BYTES_MAX: Final = 256
WILDCARDS_MAX: Final = 8
TOPIC_BYTES_MAX: Final = 256
MAILBOX_PREFIX: Final = "hub/mbox/"
TOPIC_PREFIX: Final = "hub/topic/"
# Parsed addresses are cached. A full cache holds about 3 MiB.
_ADDRESS_CACHE_MAX: Final = 8192

_PATH: Final = re.compile(r"[A-Za-z0-9_.:~-]+(?:/[A-Za-z0-9_.:~-]+)*+")
_TOPIC: Final = re.compile(r"[A-Za-z0-9/_.:~-]+")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_.:~-]*")
# They would collide with what belongs to a stream.
_RESERVED: Final = frozenset({".", "..", "pk", "touch"})

ValueT = TypeVar("ValueT", bound=Hashable)


def parse_address(text: str, field: str = "actorAddress") -> str:
    """The path of an address: `browser/w-1` of `@(browser/w-1)`. `field` is named in the refusal."""
    try:
        return _parse_path(text)
    except ValueError as error:
        raise field_error(field, str(error)) from None


@lru_cache(_ADDRESS_CACHE_MAX)
def _parse_path(text: str) -> str:
    if len(text) > ADDRESS_BYTES_MAX:
        raise ValueError(f"an address must have at most {ADDRESS_BYTES_MAX} bytes")
    path = text[2:-1]
    if text[:2] != "@(" or text[-1:] != ")" or not _PATH.fullmatch(path):
        raise ValueError("an address must be @(segment/segment...) of A-Z, a-z, 0-9, '-', '_', '.', ':', '~'")
    segments = path.split("/")
    if len(segments) > SEGMENTS_MAX:
        raise ValueError(f"an address must have at most {SEGMENTS_MAX} segments")
    _check_segments(segments)
    return path


def _check_segments(segments: list[str]) -> None:
    for segment in segments:
        if segment in _RESERVED or segment.startswith("_"):
            raise ValueError(
                f"no segment can be {segment!r}: '.', '..', 'pk', 'touch' and '_...' are reserved"
            )


def format_address(path: str) -> str:
    return f"@({path})"


def mailbox_stream(path: str) -> str:
    """The stream of a durable actor's messages."""
    return f"{MAILBOX_PREFIX}{path}"


def topic_stream(topic: str) -> str:
    return f"{TOPIC_PREFIX}{topic}"


def is_own_path(owner: str, path: str) -> bool:
    """Whether a path is the owner's own, or below it: `@(a/b)` owns itself and `@(a/b/...)`."""
    return bool(owner) and (path == owner or path.startswith(f"{owner}/"))


class AddressPattern:
    """A pattern of discovery: `*` is any run of characters, everything else is literal.

    The pieces between the stars are looked for from left to right, each as early as it can be: an early
    place never spoils a later one, so nothing is ever tried twice.
    """

    __slots__ = ("_first", "_last", "_middle", "_shortest", "_starred", "text")

    def __init__(self, text: str, field: str = "pattern") -> None:
        if len(text.encode("utf-8", "surrogatepass")) > PATTERN_BYTES_MAX or text.count("*") > WILDCARDS_MAX:
            raise field_error(
                field, f"a pattern has at most {PATTERN_BYTES_MAX} bytes and {WILDCARDS_MAX} stars"
            )
        self.text = text
        pieces = _strip_brackets(text).split("*")
        self._starred = len(pieces) > 1
        self._first, self._last = pieces[0], pieces[-1]
        self._middle = [piece for piece in pieces[1:-1] if piece]
        self._shortest = sum(map(len, pieces))

    @property
    def prefix(self) -> str:
        """What every matching path begins with."""
        return self._first

    @property
    def literal(self) -> str | None:
        """The only path that can match, if there are no stars."""
        return None if self._starred else self._first

    def matches(self, address: str) -> bool:
        """Whether an address, or the path of one, matches."""
        path = _strip_brackets(address)
        if not self._starred:
            return path == self._first
        if len(path) < self._shortest or not path.startswith(self._first) or not path.endswith(self._last):
            return False
        position, end = len(self._first), len(path) - len(self._last)
        for piece in self._middle:
            found = path.find(piece, position, end)
            if found < 0:
                return False
            position = found + len(piece)
        return True


def _strip_brackets(text: str) -> str:
    return text[2:-1] if text.startswith("@(") and text.endswith(")") else text


def parse_topic(text: str, field: str = "topic", *, durable: bool = False) -> str:
    """A topic that can be published to; a durable one can also be part of a stream's name."""
    if len(text) > TOPIC_BYTES_MAX or not _TOPIC.fullmatch(text):
        raise field_error(
            field, f"a topic has 1 to {TOPIC_BYTES_MAX} of A-Z, a-z, 0-9, '/', '_', '-', '.', ':', '~'"
        )
    if durable and (problem := durable_topic_error(text)):
        raise field_error(field, problem)
    return text


def durable_topic_error(topic: str) -> str | None:
    """Why this topic cannot be a stream name; None if it can."""
    segments = topic.split("/")
    if "" in segments:
        return "a durable topic has no empty segment"
    try:
        _check_segments(segments)
    except ValueError as error:
        return str(error)
    return None


class TopicFilter:
    """A subscription filter: `+` is exactly one segment, a last `#` is any number of segments."""

    __slots__ = ("_segments", "rest", "text")

    def __init__(self, text: str, field: str = "topic") -> None:
        self.text = text
        segments = text.split("/")
        self.rest = segments[-1] == "#"
        self._segments = segments[:-1] if self.rest else segments
        wild = all(segment == "+" or _SEGMENT.fullmatch(segment) for segment in self._segments)
        if not text or len(text) > TOPIC_BYTES_MAX or not wild:
            raise field_error(
                field,
                "a filter is a topic in which '+' may be a whole segment and '#' may be the whole last one",
            )

    @property
    def segments(self) -> list[str]:
        """The segments without a last `#`."""
        return self._segments

    @property
    def is_plain(self) -> bool:
        """Whether it is the name of one topic."""
        return not self.rest and "+" not in self._segments

    def matches(self, topic: str) -> bool:
        segments = topic.split("/")
        wanted = self._segments
        if len(segments) < len(wanted) or (len(segments) > len(wanted) and not self.rest):
            return False
        return all(want in ("+", has) for want, has in zip(wanted, segments, strict=False))


class _TrieNode(Generic[ValueT]):
    __slots__ = ("below", "ends", "rests")

    def __init__(self) -> None:
        self.below: dict[str, _TrieNode[ValueT]] = {}
        # A dict as an ordered set: insertion order.
        self.ends: dict[ValueT, None] = {}
        self.rests: dict[ValueT, None] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.below or self.ends or self.rests)


class TopicTrie(Generic[ValueT]):
    """Filters by segment. A publication walks down its own segments, however many filters there are."""

    __slots__ = ("_root", "_size")

    def __init__(self) -> None:
        self._root: _TrieNode[ValueT] = _TrieNode()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, wanted: TopicFilter, value: ValueT) -> None:
        node = self._root
        for segment in wanted.segments:
            below = node.below.get(segment)
            if below is None:
                below = node.below[segment] = _TrieNode()
            node = below
        held = node.rests if wanted.rest else node.ends
        self._size += value not in held
        held[value] = None

    def remove(self, wanted: TopicFilter, value: ValueT) -> bool:
        """Whether it was present. Removes nodes that became empty."""
        path = [self._root]
        for segment in wanted.segments:
            below = path[-1].below.get(segment)
            if below is None:
                return False
            path.append(below)
        held = path[-1].rests if wanted.rest else path[-1].ends
        if value not in held:
            return False
        del held[value]
        self._size -= 1
        for segment in reversed(wanted.segments):
            if not path.pop().is_empty:
                break
            del path[-1].below[segment]
        return True

    def match(self, topic: str) -> list[ValueT]:
        """The values of all filters that match; a value comes once for each of its filters."""
        found: list[ValueT] = []
        level = [self._root]
        for segment in topic.split("/"):
            following: list[_TrieNode[ValueT]] = []
            for node in level:
                if node.rests:
                    found.extend(node.rests)
                below = node.below
                if (literal := below.get(segment)) is not None:
                    following.append(literal)
                if (any_one := below.get("+")) is not None:
                    following.append(any_one)
            level = following
            if not level:
                return found
        for node in level:
            found.extend(node.rests)
            found.extend(node.ends)
        return found
