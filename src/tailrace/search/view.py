"""A stream's records as queries see them: promoted to one version of its registry, and their field values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from tailrace.schema.convert import LensFailureError
from tailrace.schema.payload import UnreadableRecordError, decode_payload
from tailrace.schema.pointer import ABSENT, parse_pointer
from tailrace.schema.promote import Promoter
from tailrace.schema.registry import Registry
from tailrace.schema.search_config import SearchConfig
from tailrace.search.members import DECODE_ERRORS, Getter, MemberReader, PointerTokens
from tailrace.search.values import Convert, Value, converter_for, flatten_leaves

NO_VALUES: tuple[Value, ...] = ()

Row = list[Sequence[Value]]  # the values of one record, by the order of the fields


class RecordView:
    """One registry with search configured. Entries count from 1, the registry's sequence numbers from 0."""

    def __init__(self, registry: Registry) -> None:
        assert registry.search is not None
        self.registry = registry
        self.config: SearchConfig = registry.search
        self.version = registry.version
        self._promoter = Promoter(registry)
        self.primary = self.config.primary_timestamp_field
        self.indexed: RecordView = (
            self  # what indexes are made of; one query may ask for more fields than that
        )

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
            record = decode_payload(payload)
            version = self.registry.version_at(entry - 1)
            return record if version in (0, self.version) else self._promoter.promote(record, version)
        except (UnreadableRecordError, LensFailureError):
            return None

    def same_values(self, other: RecordView) -> bool:
        """Whether every record has the same values under both registries."""
        mine, its = self.registry, other.registry
        return mine is its or (
            mine.version == its.version
            and self.config.fields == other.config.fields
            and mine.lenses == its.lenses
            and mine.boundaries == its.boundaries
        )


class FieldExtractor:
    """The values of some fields, taken from payloads without decoding what nobody asks for."""

    def __init__(self, view: RecordView, names: Sequence[str]) -> None:
        self._decoder = RecordDecoder(view, names)
        fields = view.config.fields
        self._gets = [
            _nothing if get is None else _values(get, converter_for(fields[name]))
            for name, get in self._decoder.gets.items()
        ]

    def row(self, entry: int, payload: bytes | memoryview) -> Row:
        """The values of one stored entry."""
        members = self._decoder.members(entry, payload)
        return [get(members) for get in self._gets]


class RecordDecoder:
    """The parts of stored payloads that some fields are made of, at the version of a view."""

    def __init__(self, view: RecordView, names: Sequence[str]) -> None:
        self._view = view
        self._first_current = view.first_current()
        pointers: dict[str, PointerTokens] = {}
        for name in names:
            pointer = view.config.fields[name].pointer_at(view.version)
            # No binding yet, or the whole record, which is an object and so no value: nothing is there.
            tokens = parse_pointer(pointer) if pointer else None
            if tokens:
                pointers[name] = tokens
        self._members = MemberReader(pointers.values())
        self.gets: dict[str, Getter | None] = {
            name: self._members.getter(pointers[name]) if name in pointers else None for name in names
        }

    def members(self, entry: int, payload: bytes | memoryview) -> Any:
        if entry >= self._first_current:
            try:
                return self._members.decode(payload)
            except DECODE_ERRORS:
                pass
        return self._members.of_record(self._view.record(entry, payload))

    def all_members(self, entries: Sequence[int], payloads: Sequence[bytes | memoryview]) -> list[Any]:
        """As `members`, of many. Entries ascend."""
        if entries and entries[0] >= self._first_current:
            decode = self._members.decode
            try:
                return [decode(payload) for payload in payloads]
            except DECODE_ERRORS:
                pass
        return list(map(self.members, entries, payloads))


def _nothing(_members: object) -> Sequence[Value]:
    return NO_VALUES


def _values(get: Getter, convert: Convert) -> Callable[[Any], Sequence[Value]]:
    def values(members: Any) -> Sequence[Value]:
        found = get(members)
        if found is None or found is ABSENT:
            return NO_VALUES
        if type(found) is list:
            listed = (convert(leaf) for leaf in flatten_leaves(cast("object", found)))
            return tuple(value for value in listed if value is not None)
        value = convert(found)
        return NO_VALUES if value is None else (value,)

    return values
