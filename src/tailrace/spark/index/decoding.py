"""Payloads into leaves: each record is decoded once, and only what somebody asks for is made of it.

The fast way gives the decoder a shape with just the members that are wanted. Records that do not fit the
shape (no object, a member of another type on the way, an older version) take the reference way, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import astuple

from tailrace.schema.json_values import ABSENT, resolve_pointer
from tailrace.search.records import RecordView

PointerTokens = tuple[str, ...]
LeafColumn = list[Any]  # what lies at one pointer, by row; None where nothing does


class _PathNode:
    """A member on the way to leaves."""

    def __init__(self) -> None:
        self.wanted = False
        self.children: dict[str, _PathNode] = {}
        self.empty: Any = None  # a struct without any of its members
        self.deep: list[PointerTokens] = []  # below here an array may be entered: found by the reference way

    def add(self, tokens: PointerTokens, at: int = 0) -> None:
        if at == len(tokens):
            self.wanted = True
        elif at and tokens[at].isdigit():
            self.deep.append(tokens[at:])
        else:
            self.children.setdefault(tokens[at], _PathNode()).add(tokens, at + 1)

    def arrange(self, example: object) -> None:
        """Members in the order in which records have them: there the decoder looks for the next one first."""
        if not isinstance(example, dict):
            return
        record = cast("dict[str, object]", example)
        places = {name: place for place, name in enumerate(record)}
        self.children = dict(sorted(self.children.items(), key=lambda one: places.get(one[0], len(places))))
        for name, child in self.children.items():
            child.arrange(record.get(name))

    @property
    def opaque(self) -> bool:
        """Taken as it is, whatever it is: it is a leaf itself, or there is an array on the way."""
        return self.wanted or bool(self.deep)


class PayloadDecoder:
    """Leaves of payloads at some pointers. `reference` has every record take the reference way."""

    def __init__(self, view: RecordView, pointers: Iterable[PointerTokens], *, reference: bool) -> None:
        self._view = view
        self._reference = reference
        self._first_current = view.first_current()
        self._pointers = sorted({tokens for tokens in pointers if tokens})
        root = _PathNode()
        for tokens in self._pointers:
            root.add(tokens)
        self._root = root
        self._decode: Callable[[memoryview], object] | None = None  # made for the first record

    def leaves(
        self, entries: Sequence[int], payloads: Sequence[memoryview]
    ) -> tuple[dict[PointerTokens, LeafColumn], dict[int, object]]:
        """By pointer, what lies there in each row; and the records, by row, that were decoded whole."""
        members, whole = self._members(entries, payloads)
        found: dict[PointerTokens, LeafColumn] = {}
        _collect_leaves(self._root, members, (), found)
        for row, record in whole.items():
            usable = isinstance(record, dict)
            for tokens in self._pointers:
                leaf = resolve_pointer(cast("object", record), tokens) if usable else ABSENT
                found[tokens][row] = None if leaf is ABSENT else leaf
        return found, whole

    def _members(
        self, entries: Sequence[int], payloads: Sequence[memoryview]
    ) -> tuple[list[object], dict[int, object]]:
        whole: dict[int, object] = {}
        if self._decode is None:
            self._root.arrange(self._view.record(entries[0], payloads[0]))
            self._decode = msgspec.json.Decoder(_build_struct(self._root)).decode
        decode, record_of = self._decode, self._view.record
        if not self._reference and entries[0] >= self._first_current:
            try:
                return list(map(decode, payloads)), whole
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
        members: list[object] = []
        for row, (entry, payload) in enumerate(zip(entries, payloads, strict=True)):
            if not self._reference and (entry >= self._first_current or self._view.is_current(entry)):
                try:
                    members.append(decode(payload))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    pass
                else:
                    continue
            members.append(self._root.empty)
            whole[row] = record_of(entry, payload)
        return members, whole


def _build_struct(node: _PathNode) -> Any:
    """A struct with the wanted members. One that is missing counts as null does: neither has values."""
    fields: list[tuple[str, Any, Any]] = []
    names: dict[str, str] = {}
    for index, (name, child) in enumerate(node.children.items()):
        names[f"m{index}"] = name
        fields.append((f"m{index}", Any if child.opaque else _build_struct(child) | None, None))
    shape = msgspec.defstruct("Members", fields, rename=names, gc=False)
    node.empty = cast("Callable[[], object]", shape)()
    return shape


def _collect_leaves(
    node: _PathNode, members: Sequence[Any], path: PointerTokens, found: dict[PointerTokens, LeafColumn]
) -> None:
    """Columns of leaves from a column of structs."""
    columns = zip(*map(astuple, members), strict=True)
    for (name, child), column in zip(node.children.items(), columns, strict=True):
        leaves = list(column)
        here = (*path, name)
        if not child.opaque:
            empty = child.empty
            _collect_leaves(child, [empty if leaf is None else leaf for leaf in leaves], here, found)
            continue
        if child.wanted:
            found[here] = leaves
        for rest in _nested_pointers(child):
            below = [resolve_pointer(value, rest) for value in leaves]
            found[here + rest] = [None if leaf is ABSENT else leaf for leaf in below]


def _nested_pointers(node: _PathNode) -> list[PointerTokens]:
    """Every wanted pointer below a member that is taken as it is."""
    found = list(node.deep)
    for name, child in node.children.items():
        if child.wanted:
            found.append((name,))
        found += [(name, *rest) for rest in _nested_pointers(child)]
    return found
