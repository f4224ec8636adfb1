"""A stream's records as queries see them: promoted to one version of its registry, and their field values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tailrace.query.values import Convert, Value, converter, leaves
from tailrace.schema.convert import LensFailureError
from tailrace.schema.payload import UnreadableRecordError, decode_record
from tailrace.schema.pointer import ABSENT, find, parse_pointer
from tailrace.schema.promote import Promoter
from tailrace.schema.registry import Registry
from tailrace.schema.search_config import SearchConfig

NO_VALUES: tuple[Value, ...] = ()

Row = list[Sequence[Value]]  # the values of one record, by the order of the fields


class View:
    """One registry with search configured. Entries count from 1, the registry's sequence numbers from 0."""

    def __init__(self, registry: Registry) -> None:
        assert registry.search is not None
        self.registry = registry
        self.config: SearchConfig = registry.search
        self.version = registry.version
        self._promoter = Promoter(registry)
        self.primary = self.config.primary_timestamp_field

    def is_current(self, entry: int) -> bool:
        """Whether the stored payload is what readers see."""
        return self.registry.version_at(entry - 1) in (0, self.version)

    def first_current(self) -> int:
        """From this entry on nothing needs promotion."""
        boundaries = self.registry.boundaries
        return boundaries[-1].offset + 1 if len(boundaries) > 1 else 0

    def record(self, entry: int, payload: bytes | memoryview) -> object:
        """The promoted record; None if it cannot be had, which is to say: no values."""
        try:
            record = decode_record(payload)
            version = self.registry.version_at(entry - 1)
            return record if version in (0, self.version) else self._promoter.promote(record, version)
        except (UnreadableRecordError, LensFailureError):
            return None

    def same_values(self, other: View) -> bool:
        """Whether every record has the same values under both registries."""
        mine, its = self.registry, other.registry
        return mine is its or (
            mine.version == its.version
            and self.config.fields == other.config.fields
            and mine.lenses == its.lenses
            and mine.boundaries == its.boundaries
        )


class Extractor:
    """The values of some fields, taken from payloads without decoding what nobody asks for."""

    def __init__(self, view: View, names: Sequence[str]) -> None:
        self._view = view
        self._first_current = view.first_current()
        members: dict[str, str] = {}
        self._gets: list[Callable[[Any], Sequence[Value]]] = []
        for name in names:
            field = view.config.fields[name]
            pointer = field.pointer_at(view.version)
            tokens = parse_pointer(pointer) if pointer else None
            if not tokens:  # no binding yet, or the whole record, which is an object and so no value
                self._gets.append(_nothing)
                continue
            attribute = members.setdefault(tokens[0], f"m{len(members)}")
            self._gets.append(_getter(attribute, tokens[1:], converter(field)))
        self._members = tuple(members)
        attributes = [(attribute, Any, None) for attribute in members.values()]
        self._shape = cast(
            "Callable[..., object]",
            msgspec.defstruct("Members", attributes, rename={v: k for k, v in members.items()}, gc=False),
        )
        self._decode = msgspec.json.Decoder(cast("type[object]", self._shape)).decode
        self._none: Row = [NO_VALUES] * len(names)

    def row(self, entry: int, payload: bytes | memoryview) -> Row:
        """The values of one stored entry."""
        if entry >= self._first_current:
            try:
                members = self._decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
            else:
                return [get(members) for get in self._gets]
        record = self._view.record(entry, payload)
        if not isinstance(record, dict):
            return self._none
        find_member = cast("dict[str, object]", record).get
        members = self._shape(*map(find_member, self._members))
        return [get(members) for get in self._gets]


def _nothing(_members: object) -> Sequence[Value]:
    return NO_VALUES


def _getter(attribute: str, rest: tuple[str, ...], convert: Convert) -> Callable[[Any], Sequence[Value]]:
    def get(members: Any) -> Sequence[Value]:
        found: object = getattr(members, attribute)
        if found is None:
            return NO_VALUES
        if rest:
            found = find(found, rest)
        if type(found) is list:
            values = (convert(leaf) for leaf in leaves(cast("object", found)))
            return tuple(value for value in values if value is not None)
        if found is ABSENT:
            return NO_VALUES
        value = convert(found)
        return NO_VALUES if value is None else (value,)

    return get
