"""Touch keys: hashes of entities, templates and arguments, which of them a change touches, and their journal.

Clients wait on keys. The journal holds when each key was last touched, within a bounded memory; times are
generations: the number of source entries up to and including the one that touched the key. It is a cache over
the stream: what it no longer holds can be derived from the stream again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, cast

import xxhash
from msgspec import Struct

from tailrace.schema.lenses import value_text
from tailrace.schema.profiles.state_protocol import Change
from tailrace.schema.timestamps import TIMESTAMP_MS_MAX, TIMESTAMP_MS_MIN, from_unix_ms, to_unix_ms

ENCODINGS: Final = ("string", "int64", "bool", "datetime", "bytes")
ID_MASK: Final = 0xFFFF_FFFF

_KEY = re.compile(r"[0-9a-f]{16}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


def table_key(entity: str) -> int:
    return _hash(b"tbl\0" + _bytes(entity))


def template_id(entity: str, fields: Iterable[str]) -> int:
    """Encodings are not part of it. Fields are in the order of their bytes."""
    return _hash(b"tpl\0" + b"\0".join((_bytes(entity), *sorted(map(_bytes, fields)))))


def template_key(identity: int) -> int:
    return _hash(b"tpl\0" + identity.to_bytes(8))


def watch_key(identity: int, arguments: Sequence[str]) -> int:
    return _hash(b"key\0" + identity.to_bytes(8) + _arguments(arguments))


def membership_key(identity: int, arguments: Sequence[str]) -> int:
    return _hash(b"mem\0" + identity.to_bytes(8) + _arguments(arguments))


def field_key(identity: int, field: str, arguments: Sequence[str]) -> int:
    return _hash(b"fld\0" + identity.to_bytes(8) + b"\0" + _bytes(field) + _arguments(arguments))


def format_key(key: int) -> str:
    return f"{key:016x}"


def read_key(text: str) -> int | None:
    """A literal 64-bit key; None if the text is something else."""
    text = text.strip().lower()
    return int(text, 16) if _KEY.fullmatch(text) else None


def key_id(text: str) -> int:
    """The 32 bits that clients may send instead of a key."""
    key = read_key(text)
    return xxhash.xxh32_intdigest(_bytes(text.strip().lower())) if key is None else key & ID_MASK


def encode_argument(value: object, encoding: str) -> str | None:
    """One argument of a query as text; None if the value cannot be one."""
    if value is None or isinstance(value, dict | list):
        return None
    if encoding == "int64":
        return _int64(value)
    if encoding == "bool":
        return ("1" if value else "0") if isinstance(value, bool) else None
    if encoding == "datetime":
        return _datetime(value)
    if encoding == "bytes":
        return value if isinstance(value, str) else None
    return value_text(value)


def _int64(value: object) -> str | None:
    if isinstance(value, str):
        value = int(value) if _INTEGER.fullmatch(value.strip()) else None
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        return None
    return str(value)


def _datetime(value: object) -> str | None:
    if isinstance(value, str):
        value = to_unix_ms(value.strip())
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not TIMESTAMP_MS_MIN <= value <= TIMESTAMP_MS_MAX
    ):
        return None
    return from_unix_ms(int(value // 1))


def _arguments(arguments: Sequence[str]) -> bytes:
    return b"".join([b"\0" + _bytes(argument) for argument in arguments])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


KEYS_PER_CHANGE_MAX: Final = 10_000  # above this, a change has coarse touches only

Row = dict[str, object]


class Template(Struct):
    """A shape of queries: all rows of an entity with certain values in certain fields."""

    entity: str
    fields: tuple[tuple[str, str], ...]  # names in the order of their bytes, each with its encoding
    active_from: int  # first sequence number that touches it
    last_seen_ms: int
    ttl_ms: int
    identity: int = 0
    key: int = 0
    table_before: int | None = None  # generation of the entity's last change before, as far as it is known

    def __post_init__(self) -> None:
        self.identity = template_id(self.entity, [name for name, _ in self.fields])
        self.key = template_key(self.identity)

    def arguments(self, row: object) -> list[str] | None:
        """The row's values of the fields; None if one of them is missing or cannot be an argument."""
        if not isinstance(row, dict):
            return None
        found: list[str] = []
        for name, encoding in self.fields:
            argument = encode_argument(cast("Row", row).get(name), encoding)
            if argument is None:
                return None
            found.append(argument)
        return found


class TouchedKeys(Struct):
    """Fine keys, and whether those do not say everything: then every waiter on the entity has to wake."""

    keys: list[int]
    coarse: bool = False
    error: bool = False


def touched_keys(change: Change, templates: Iterable[Template], on_missing_before: str) -> TouchedKeys:
    """The fine keys of one change, for the templates that are active at it."""
    emission = TouchedKeys([])
    for template in templates:
        if change.operation == "insert":
            _row(emission, template, change.after)
        elif change.operation == "delete":
            image = change.after if change.before is None else change.before
            if not _has_template_fields(template, image):
                emission.coarse = True
            _row(emission, template, image)
        elif _has_both_images(template, change):
            _update(emission, template, change)
        else:
            emission.coarse = True
            emission.error = on_missing_before == "error"
            if on_missing_before == "skipBefore":
                _row(emission, template, change.after)
        if len(emission.keys) > KEYS_PER_CHANGE_MAX:
            return TouchedKeys([], coarse=True)
    return emission


def _has_template_fields(template: Template, image: object) -> bool:
    """Whether the image has the template's fields. One without them may belong to any set of arguments."""
    return isinstance(image, dict) and all(name in image for name, _ in template.fields)


def _has_both_images(template: Template, change: Change) -> bool:
    """Whether both images are there, and the one before lacks no field that the one after has."""
    images = (change.before, change.after)
    if not all(isinstance(image, dict) for image in images):
        return False
    before, after = cast("tuple[Row, Row]", images)
    return all(name in before or name not in after for name, _ in template.fields)


def _row(emission: TouchedKeys, template: Template, row: object) -> None:
    arguments = template.arguments(row)
    if arguments is not None:
        emission.keys += (
            watch_key(template.identity, arguments),
            membership_key(template.identity, arguments),
        )


def _update(emission: TouchedKeys, template: Template, change: Change) -> None:
    old, new = template.arguments(change.before), template.arguments(change.after)
    tuples = [arguments for arguments in (old, new) if arguments is not None]
    if old == new:
        tuples = tuples[:1]
    changed = _changed_fields(cast("Row", change.before), cast("Row", change.after))
    if len(changed) * len(tuples) > KEYS_PER_CHANGE_MAX:
        emission.coarse = True
        changed = []
    for arguments in tuples:
        emission.keys.append(watch_key(template.identity, arguments))
        if old != new:
            emission.keys.append(membership_key(template.identity, arguments))
        emission.keys += [field_key(template.identity, name, arguments) for name in changed]


def _changed_fields(before: Row, after: Row) -> list[str]:
    """Fields whose scalar value is another one. True is not 1."""
    changed: list[str] = []
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict | list) and isinstance(new, dict | list):
            continue
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            changed.append(name)
    return changed


LAYERS_MAX: Final = 3
KEY_BYTES: Final = 250  # of one key in its two tables, about
ENTITIES_MAX: Final = 4096  # with coarse marks; beyond, marks are for everyone


class JournalLayer:
    """Keys touched from a generation on, by key and by the 32 bits clients may use instead."""

    __slots__ = ("ids", "keys", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.keys: dict[int, int] = {}
        self.ids: dict[int, int] = {}

    def record(self, key: int, generation: int) -> None:
        self.keys[key] = generation
        self.ids[key & ID_MASK] = generation


class TouchJournal:
    """Layers, oldest first. Each is decided by itself; a key's newest touch is in the newest that has it."""

    def __init__(self, start: int, layer_keys_max: int) -> None:
        self._keys_max = layer_keys_max
        self.layers = [JournalLayer(start)]
        self.absorbed = start
        self.everyone = 0  # generation of the last touch that is for all keys
        self.coarse: dict[str, int] = {}  # last coarse mark by entity
        self.coarse_any = 0

    @property
    def floor(self) -> int:
        """Touches after this generation are known."""
        return self.layers[0].start

    @property
    def memory_bytes(self) -> int:
        return sum(len(layer.keys) for layer in self.layers) * KEY_BYTES

    def record(self, keys: list[int], generation: int) -> None:
        layer = self.layers[-1]
        for key in keys:
            layer.record(key, generation)
        if len(layer.keys) >= self._keys_max:
            self.layers.append(JournalLayer(generation))
            if len(self.layers) > LAYERS_MAX:
                del self.layers[0]

    def mark(self, entity: str, generation: int) -> None:
        """From here on it is not known which rows of the entity were touched at this generation."""
        if entity not in self.coarse and len(self.coarse) >= ENTITIES_MAX:
            self.everyone = max(self.everyone, generation)
            return
        self.coarse[entity] = max(self.coarse.get(entity, 0), generation)
        self.coarse_any = max(self.coarse_any, generation)

    def extend_back(self, past: JournalLayer, upto: int) -> None:
        """Takes in what was derived again, if nothing was forgotten meanwhile and there is room for it."""
        oldest = self.layers[0]
        if self.floor != upto:
            return
        if len(self.layers) < LAYERS_MAX:
            self.layers.insert(0, past)
        elif len(oldest.keys) + len(past.keys) <= 2 * self._keys_max:
            past.keys |= oldest.keys
            past.ids |= oldest.ids
            self.layers[0] = past

    def last_key(self, key: int) -> int:
        """The generation of the key's last touch; 0 if none is known."""
        for layer in reversed(self.layers):
            if (found := layer.keys.get(key)) is not None:
                return found
        return 0

    def last_id(self, key_id: int) -> int:
        for layer in reversed(self.layers):
            if (found := layer.ids.get(key_id)) is not None:
                return found
        return 0
