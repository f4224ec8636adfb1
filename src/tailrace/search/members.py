"""The members of a record that some pointers lead to, decoded alone: the rest of the payload is passed over.

A payload becomes a struct with an attribute for each top-level member that is wanted, and where a pointer
leads deeper, a struct in its place. A member that is missing counts as null does: neither has values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec

from tailrace.schema.pointer import ABSENT, resolve_pointer

PointerTokens = tuple[str, ...]
Getter = Callable[[Any], object]  # from the members of a record to what a pointer finds

# What a member may be where an object is expected. An array may be gone into by its places.
_NON_OBJECT = str | int | float | bool | list[Any] | None

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MemberReader:
    """The wanted members of records, by pointers with one token at least."""

    __slots__ = ("_names", "_shape", "decode", "none")

    def __init__(self, pointers: Iterable[PointerTokens]) -> None:
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

    def getter(self, tokens: PointerTokens) -> Getter:
        """What lies at one of the pointers, `ABSENT` or None where nothing does."""
        return (
            attrgetter(f"m{self._names.index(tokens[0])}") if len(tokens) == 1 else _Path(self._shape, tokens)
        )


def raw_column(members: Sequence[Any], get: Getter) -> list[object]:
    """What a getter finds in each record; None where nothing is."""
    if isinstance(get, _Path):
        try:
            return list(map(get.straight, members))
        except AttributeError:
            pass  # something else than an object is on the way
    found = list(map(get, members))
    return [None if item is ABSENT else item for item in found] if ABSENT in found else found


class _Path:
    """The way to a member that lies deeper."""

    __slots__ = ("_tokens", "straight")

    def __init__(self, shape: Any, tokens: PointerTokens) -> None:
        self._tokens = tokens
        attributes: list[str] = []
        for token in tokens:
            if shape is None:
                break  # behind a member that is wanted whole
            attribute, shape = shape.inner[token]
            attributes.append(attribute)
        # Leads to the end where there are objects all the way. A way that is cut short leads nowhere.
        whole = len(attributes) == len(tokens)
        self.straight = attrgetter(".".join(attributes) if whole else "no_straight_way")

    def __call__(self, members: Any) -> object:
        found, at = members, 0
        while at < len(self._tokens) and isinstance(found, _Shape):
            attribute, _ = cast("Any", type(found)).inner[self._tokens[at]]
            found = getattr(found, attribute)
            at += 1
        return resolve_pointer(found, self._tokens[at:])


class _Node:
    """One object of the wanted shape."""

    def __init__(self) -> None:
        self.inner: dict[str, _Node] = {}
        self.whole = False  # some pointer ends here

    def add(self, tokens: PointerTokens) -> None:
        if not tokens:
            self.whole = True
            return
        self.inner.setdefault(tokens[0], _Node()).add(tokens[1:])

    def shape(self) -> Callable[..., object]:
        fields: list[tuple[str, Any, Any]] = []
        inner: dict[str, tuple[str, Any]] = {}
        for index, (name, node) in enumerate(self.inner.items()):
            shape: Any = None if node.whole or not node.inner else node.shape()
            # An object that is missing is as good as an empty one, and leads on.
            fields.append(
                (f"m{index}", Any, None) if shape is None else (f"m{index}", shape | _NON_OBJECT, shape())
            )
            inner[name] = f"m{index}", shape
        names = {attribute: name for name, (attribute, _) in inner.items()}
        made: Any = msgspec.defstruct("Members", fields, bases=(_Shape,), rename=names, frozen=True, gc=False)
        made.inner = inner
        return made


class _Shape(msgspec.Struct, frozen=True):
    """What all shapes are. In `inner` each has its attributes, and the shapes there, by names of members."""
