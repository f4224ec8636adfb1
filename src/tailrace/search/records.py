"""Records as queries see them: promoted to the current schema version, with field values and text tokens.

Server, tail index, scans and index jobs share these functions, so that they cannot disagree. A field has a
list of 0..n values: the leaves at its pointer, arrays flattened, each converted by the field's kind; leaves
that do not convert are omitted. Texts are tokenised by `unicode_word_v1`: lower case, runs of letters and
digits.

For speed, only the members that the fields point to are decoded, into a struct with an attribute for each
top-level member and nested structs for deeper pointers. A missing member is the same as null: no values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import msgspec

from tailrace.common.timestamps import parse_rfc3339_ms
from tailrace.schema.json_values import (
    ABSENT,
    UnreadableRecordError,
    decode_payload,
    parse_pointer,
    resolve_pointer,
)
from tailrace.schema.lenses import LensFailureError
from tailrace.schema.registry import Promoter, Registry
from tailrace.schema.search_config import Field, SearchConfig

TOKEN_BYTES_MAX: Final = 1024

# Word characters without the underscore are exactly the Unicode categories L* and N*.
_find_words = re.compile(r"[^\W_]+").findall


def tokenize_text(text: str) -> list[str]:
    """The tokens of one text in order (`unicode_word_v1`)."""
    tokens: list[str] = _find_words(text.lower())
    if len(text) * 4 > TOKEN_BYTES_MAX:
        return [truncate_token(token) for token in tokens]
    return tokens


def truncate_token(token: str) -> str:
    """The indexed part of a token: whole characters in the first 1024 bytes."""
    if len(token) * 4 <= TOKEN_BYTES_MAX:
        return token
    encoded = token.encode()
    return token if len(encoded) <= TOKEN_BYTES_MAX else encoded[:TOKEN_BYTES_MAX].decode(errors="ignore")


Value = str | int | float | bool
Convert = Callable[[object], Value | None]

INT64_MAX: Final = 2**63 - 1

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_SECOND: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
# Several in UTC with milliseconds, separated by line feeds.
_COMMON_TIMESTAMP_LINES: Final = re.compile(rf"{_SECOND}\.[0-9]{{3}}Z(?:\n{_SECOND}\.[0-9]{{3}}Z)*+")
_BOOLS: Final = {"true": True, "false": False}


def field_values(record: object, field: Field, version: int) -> list[Value]:
    """The values of a field in a record at schema version `version`. Only objects have values."""
    pointer = field.pointer_at(version)
    if pointer is None:
        return []
    tokens = parse_pointer(pointer)
    assert tokens is not None, "pointers are checked when a registry is installed"
    return extract_values(record, tokens, converter_for(field))


def extract_values(record: object, tokens: tuple[str, ...], convert: Convert) -> list[Value]:
    """As `field_values`, with the pointer parsed and the converter chosen once for many records."""
    if not isinstance(record, dict):
        return []
    found = resolve_pointer(cast("object", record), tokens)
    if not isinstance(found, list):
        value = None if found is ABSENT else convert(found)
        return [] if value is None else [value]
    values = (convert(leaf) for leaf in flatten_leaves(cast("object", found)))
    return [value for value in values if value is not None]


def flatten_leaves(value: object) -> list[object]:
    """The leaves of nested arrays; none if the pointer found nothing."""
    if value is ABSENT:
        return []
    if not isinstance(value, list):
        return [value]
    found: list[object] = []
    waiting: list[object] = [cast("object", value)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(reversed(cast("list[object]", item)))
        else:
            found.append(item)
    return found


def converter_for(field: Field) -> Convert:
    """The function from a leaf to the field's canonical value, or None. Texts are not tokenised here."""
    if field.kind == "keyword" and field.normalizer == "lowercase_v1":
        return to_lowercase
    return _CONVERTERS[field.kind]


def to_string(leaf: object) -> str | None:
    if not isinstance(leaf, str):
        return None
    # A lone surrogate cannot be encoded; it becomes the replacement character.
    return leaf if leaf.isascii() else _SURROGATES.sub("�", leaf)


def to_lowercase(leaf: object) -> str | None:
    text = to_string(leaf)
    return None if text is None else text.lower()


def to_integer(leaf: object) -> int | None:
    """A signed 64-bit integer. Whole floats count, except at the limits, where they may have been rounded."""
    if isinstance(leaf, bool):
        return None
    if isinstance(leaf, int):
        return _int64(leaf)
    if isinstance(leaf, float):
        return int(leaf) if abs(leaf) < 2.0**63 and leaf.is_integer() else None
    if isinstance(leaf, str):
        return _integer_in(leaf)
    return None


def to_float(leaf: object) -> float | None:
    """A finite double; negative zero becomes zero."""
    if isinstance(leaf, bool):
        return None
    if isinstance(leaf, int | float):
        try:
            number = float(leaf)
        except OverflowError:
            return None
    elif isinstance(leaf, str) and _DECIMAL.fullmatch(leaf):
        number = float(leaf)
    else:
        return None
    return number + 0.0 if math.isfinite(number) else None


def to_date(leaf: object) -> int | None:
    """Unix milliseconds, truncated towards zero: timestamps, calendar days, or integers as text."""
    if isinstance(leaf, str):
        instant_ms = _instant_ms(leaf)
        return _integer_in(leaf) if instant_ms is None else instant_ms
    if isinstance(leaf, bool):
        return None
    if isinstance(leaf, int):
        return _int64(leaf)
    if isinstance(leaf, float):
        return int(leaf) if abs(leaf) < 2.0**63 else None
    return None


def parse_dates(distinct: Collection[object]) -> dict[object, Value | None]:
    """`to_date` of many leaves. Timestamps in the common form are parsed once for each minute."""
    texts = [leaf for leaf in distinct if type(leaf) is str]
    found: dict[object, Value | None] = {}
    if texts and _COMMON_TIMESTAMP_LINES.fullmatch("\n".join(texts)):
        minutes = {minute: _instant_ms(f"{minute}:00.000Z") for minute in {text[:16] for text in texts}}
        for text in texts:
            minute_ms = minutes[text[:16]]
            found[text] = None if minute_ms is None else minute_ms + int(text[17:19] + text[20:23])
        if len(texts) == len(distinct):
            return found
    return found | {leaf: to_date(leaf) for leaf in distinct if leaf not in found}


def timestamp_bounds(found: Sequence[object]) -> tuple[int, int] | None:
    """The smallest and largest of timestamps in the common form, whose texts sort as their times do.

    None if one of them has another form.
    """
    if set(map(type, found)) != {str}:
        return None
    texts = cast("Sequence[str]", found)
    if not _COMMON_TIMESTAMP_LINES.fullmatch("\n".join(texts)):
        return None
    earliest, latest = _instant_ms(min(texts)), _instant_ms(max(texts))
    return None if earliest is None or latest is None else (earliest, latest)


def to_bool(leaf: object) -> bool | None:
    if isinstance(leaf, bool):
        return leaf
    if isinstance(leaf, str) and len(leaf) <= 5:
        return _BOOLS.get(leaf.lower())
    return None


def _int64(number: int) -> int | None:
    return number if -INT64_MAX - 1 <= number <= INT64_MAX else None


def _integer_in(text: str) -> int | None:
    # 19 digits and a sign are the most that fit.
    return _int64(int(text)) if len(text) <= 20 and _INTEGER.fullmatch(text) else None


def _instant_ms(text: str) -> int | None:
    return parse_rfc3339_ms(f"{text}T00:00:00Z" if len(text) == len("2026-01-31") else text)


_CONVERTERS: Final[dict[str, Convert]] = {
    "keyword": to_string,
    "text": to_string,
    "integer": to_integer,
    "float": to_float,
    "date": to_date,
    "bool": to_bool,
}


def excludes_bounds(comparison: str, bound: Any, bounds: tuple[Any, Any]) -> bool:
    """Whether the comparison with `bound` holds for no value within `bounds`."""
    least, most = bounds
    match comparison:
        case ">":
            return most <= bound
        case ">=":
            return most < bound
        case "<":
            return least >= bound
        case "<=":
            return least > bound
        case _:
            return not least <= bound <= most


PointerTokens = tuple[str, ...]
Getter = Callable[[Any], object]  # from the members of a record to the raw value at a pointer

# Types of a member where an object is expected. A pointer may index into an array.
_NON_OBJECT = str | int | float | bool | list[Any] | None

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MemberReader:
    """Decodes the members of records that pointers refer to; each pointer has at least one token."""

    __slots__ = ("_names", "_shape", "decode", "none")

    def __init__(self, pointers: Iterable[PointerTokens]) -> None:
        wanted = _Node()
        for tokens in pointers:
            wanted.add(tokens)
        self._names = tuple(wanted.inner)
        self._shape = wanted.shape()
        decoder = msgspec.json.Decoder(cast("type[object]", self._shape))
        self.decode: Callable[[bytes | memoryview], Any] = decoder.decode  # raises `DECODE_ERRORS`
        self.none: Any = self._shape()  # for a record that is not an object

    def of_record(self, record: object) -> Any:
        """The members of a decoded record."""
        if not isinstance(record, dict):
            return self.none
        return self._shape(*map(cast("dict[str, object]", record).get, self._names))

    def getter(self, tokens: PointerTokens) -> Getter:
        """The function to the raw value at one of the pointers; `ABSENT` or None if there is none."""
        return (
            attrgetter(f"m{self._names.index(tokens[0])}") if len(tokens) == 1 else _Path(self._shape, tokens)
        )


def raw_column(members: Sequence[Any], get: Getter) -> list[object]:
    """The raw value of each record; None if there is none."""
    if isinstance(get, _Path):
        try:
            return list(map(get.straight, members))
        except AttributeError:
            pass  # some record has no object on the path
    found = list(map(get, members))
    return [None if item is ABSENT else item for item in found] if ABSENT in found else found


class _Path:
    """The path to a nested member."""

    __slots__ = ("_tokens", "straight")

    def __init__(self, shape: Any, tokens: PointerTokens) -> None:
        self._tokens = tokens
        attributes: list[str] = []
        for token in tokens:
            if shape is None:
                break  # inside a member that is decoded whole
            attribute, shape = shape.inner[token]
            attributes.append(attribute)
        # Works if there are objects all along the path; else raises AttributeError.
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
    """One object of the shape to decode."""

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
            # A missing object is the same as an empty one.
            fields.append(
                (f"m{index}", Any, None) if shape is None else (f"m{index}", shape | _NON_OBJECT, shape())
            )
            inner[name] = f"m{index}", shape
        names = {attribute: name for name, (attribute, _) in inner.items()}
        made: Any = msgspec.defstruct("Members", fields, bases=(_Shape,), rename=names, frozen=True, gc=False)
        made.inner = inner
        return made


class _Shape(msgspec.Struct, frozen=True):
    """Base of all shapes. `inner` maps member names to attributes and nested shapes."""


NO_VALUES: tuple[Value, ...] = ()

Row = list[Sequence[Value]]  # the values of one record in the order of the fields


class RecordView:
    """The records of a stream under a registry with search configured.

    Entries count from 1, the registry's sequence numbers from 0.
    """

    def __init__(self, registry: Registry) -> None:
        assert registry.search is not None
        self.registry = registry
        self.config: SearchConfig = registry.search
        self.version = registry.version
        self._promoter = Promoter(registry)
        self.primary = self.config.primary_timestamp_field
        self.indexed: RecordView = self  # the fields with an index; a query may add others

    def is_current(self, entry: int) -> bool:
        """Whether the stored payload is what readers see."""
        return self.registry.version_at(entry - 1) in (0, self.version)

    def first_current(self) -> int:
        """The first entry from which no record needs promotion."""
        boundaries = self.registry.boundaries
        return boundaries[-1].offset + 1 if len(boundaries) > 1 else 0

    def record(self, entry: int, payload: bytes | memoryview) -> object:
        """The promoted record; None, which has no values, if it cannot be decoded or promoted."""
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
    """The values of some fields, without decoding the rest of a payload."""

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
    """Decodes the members of stored payloads that some fields need, at the version of a view."""

    def __init__(self, view: RecordView, names: Sequence[str]) -> None:
        self._view = view
        self._first_current = view.first_current()
        pointers: dict[str, PointerTokens] = {}
        for name in names:
            pointer = view.config.fields[name].pointer_at(view.version)
            # No binding yet, or the whole record, which is an object and so has no value.
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
        """As `members`, of many ascending entries."""
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
