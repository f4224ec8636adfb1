"""What clients wait on: hashes of an entity, of a template of queries, of one set of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from tailrace.schema.convert import value_text
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
