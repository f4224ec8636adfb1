"""The members of a record that some pointers lead to, decoded alone: the rest of the payload is passed over.

A payload becomes a struct with an attribute for each top-level member that is wanted, and where a pointer
leads deeper, a struct in its place. A member that is missing counts as null does: neither has values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec

from tailrace.schema.pointer import ABSENT, find

Tokens = tuple[str, ...]
Get = Callable[[Any], object]  # from the members of a record to what a pointer finds

# What a member may be where an object is expected. An array may be gone into by its places.
_NO_OBJECT = str | int | float | bool | list[Any] | None

UNDECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Members:
    """The wanted members of records, by pointers with one token at least."""

    __slots__ = ("_names", "_shape", "decode", "none")

    def __init__(self, pointers: Iterable[Tokens]) -> None:
        wanted = _Node()
        for tokens in pointers:
            wanted.add(tokens)
        self._names = tuple(wanted.inner)
        self._shape = wanted.shape()
        decoder = msgspec.json.Decoder(cast("type[object]", self._shape))
        self.decode: Callable[[bytes | memoryview], Any] = decoder.decode  # raises one of `UNDECODED`
        self.none: Any = self._shape()  # of a record that is no object

    def of_record(self, record: object) -> Any:
        """The members of a decoded record."""
        if not isinstance(record, dict):
            return self.none
        return self._shape(*map(cast("dict[str, object]", record).get, self._names))

    def getter(self, tokens: Tokens) -> Get:
        """What lies at one of the pointers, `ABSENT` or None where nothing does."""
        get = attrgetter(f"m{self._names.index(tokens[0])}")
        if len(tokens) == 1:
            return get
        rest = tokens[1:]
        return lambda members: _follow(get(members), rest)


def column_of_raw(members: Sequence[Any], get: Get) -> list[object]:
    """What a getter finds in each record; None where nothing is."""
    found = list(map(get, members))
    return [None if item is ABSENT else item for item in found] if ABSENT in found else found


class _Node:
    """One object of the wanted shape."""

    def __init__(self) -> None:
        self.inner: dict[str, _Node] = {}
        self.whole = False  # some pointer ends here

    def add(self, tokens: Tokens) -> None:
        if not tokens:
            self.whole = True
            return
        self.inner.setdefault(tokens[0], _Node()).add(tokens[1:])

    def shape(self) -> Callable[..., object]:
        fields: list[tuple[str, Any, None]] = []
        for index, node in enumerate(self.inner.values()):
            kind: Any = Any if node.whole or not node.inner else node.shape() | _NO_OBJECT
            fields.append((f"m{index}", kind, None))
        names = {f"m{index}": name for index, name in enumerate(self.inner)}
        made = msgspec.defstruct("Members", fields, bases=(_Shape,), rename=names, gc=False)
        made.names = {name: attribute for attribute, name in names.items()}  # type: ignore[attr-defined]
        return cast("Callable[..., object]", made)


class _Shape(msgspec.Struct):
    """What all shapes are; each knows its attributes by the names of members."""


def _follow(found: object, tokens: Tokens) -> object:
    at = 0
    while at < len(tokens) and isinstance(found, _Shape):
        attribute = cast("dict[str, str]", cast("Any", type(found)).names)[tokens[at]]
        found = getattr(found, attribute)
        at += 1
    return find(found, tokens[at:]) if at < len(tokens) else found
