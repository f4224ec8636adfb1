"""A stream's schema registry: schema versions, the lenses between them, routing key and search configuration.

Promotion applies lenses to a stored record of an older version, so that readers see the current one.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, cast

import msgspec
from msgspec import Struct

from tailrace.common.errors import TailraceError
from tailrace.schema.json_values import (
    ABSENT,
    UnusableRecordError,
    decode_json_record,
    encode_json_record,
    expect_bool,
    expect_object,
    expect_string,
    invalid_request,
    parse_pointer,
    resolve_pointer,
)
from tailrace.schema.lenses import Lens, LensFailureError, parse_lens
from tailrace.schema.search_config import SearchConfig, parse_search_config


class RoutingKey(Struct, frozen=True, rename="camel"):
    json_pointer: str
    required: bool

    def to_json(self) -> dict[str, object]:
        return {"jsonPointer": self.json_pointer, "required": self.required}


class RoutingKeyReader:
    """Reads routing keys from records."""

    __slots__ = ("_bytes_max", "_required", "_tokens")

    def __init__(self, key: RoutingKey, bytes_max: int) -> None:
        tokens = parse_pointer(key.json_pointer)
        assert tokens is not None, "checked when it was installed"
        self._tokens = tokens
        self._required = key.required
        self._bytes_max = bytes_max

    def key_of(self, record: object) -> bytes | None:
        """The routing key of a record; None if it has none and none is required."""
        found = resolve_pointer(record, self._tokens)
        if found is ABSENT or found is None or found == "":
            if self._required:
                raise invalid_request("routing key missing")
            return None
        if not isinstance(found, str):
            raise invalid_request("routing key must be string")
        try:
            key = found.encode()
        except UnicodeEncodeError:
            raise invalid_request("routing key must be valid Unicode") from None
        if len(key) > self._bytes_max:
            raise invalid_request(f"routing key must have at most {self._bytes_max} bytes")
        return key


def parse_routing_key(body: object) -> RoutingKey:
    members = expect_object(body, "routingKey", ("jsonPointer", "required"))
    pointer = expect_string(members.get("jsonPointer"), "routingKey.jsonPointer")
    if parse_pointer(pointer) is None:
        raise invalid_request("routingKey.jsonPointer must be a JSON pointer")
    return RoutingKey(pointer, expect_bool(members.get("required"), "routingKey.required"))


def key_not_allowed() -> TailraceError:
    return TailraceError("key_not_allowed", "Stream-Key not allowed when routingKey is configured")


API_VERSION: Final = "durable.streams/schema-registry/v1"


class VersionBoundary(Struct, frozen=True):
    """The first sequence number (from 0) written under a version."""

    offset: int
    version: int


class Registry(Struct, frozen=True, kw_only=True):
    """An immutable registry. `schemas` are by version, `lenses` by the version they lead from."""

    name: str
    version: int = 0
    routing_key: RoutingKey | None = None
    search: SearchConfig | None = None
    boundaries: tuple[VersionBoundary, ...] = ()
    schemas: dict[int, object] = msgspec.field(default_factory=dict[int, object])
    lenses: dict[int, dict[str, object]] = msgspec.field(default_factory=dict[int, dict[str, object]])

    def version_at(self, sequence: int) -> int:
        """The version an entry was written under; 0 before the first schema."""
        index = bisect_right(self.boundaries, sequence, key=_offset_of)
        return self.boundaries[index - 1].version if index else 0

    def to_json(self) -> bytes:
        """The registry as served, stored and published. Equal registries give equal bytes."""
        document: dict[str, object] = {
            "apiVersion": API_VERSION,
            "schema": self.name,
            "currentVersion": self.version,
        }
        if self.routing_key is not None:
            document["routingKey"] = self.routing_key.to_json()
        if self.search is not None:
            document["search"] = self.search.to_json()
        document["boundaries"] = self.boundaries
        document["schemas"] = {str(version): schema for version, schema in self.schemas.items()}
        document["lenses"] = {str(version): lens for version, lens in self.lenses.items()}
        return msgspec.json.encode(document)


def read_registry(document: bytes) -> Registry:
    """Decode a stored registry."""
    stored = msgspec.json.decode(document, type=dict[str, object])
    routing_key = stored.get("routingKey")
    search = stored.get("search")
    return Registry(
        name=cast("str", stored["schema"]),
        version=cast("int", stored["currentVersion"]),
        routing_key=None if routing_key is None else msgspec.convert(routing_key, RoutingKey),
        search=None if search is None else parse_search_config(search),
        boundaries=msgspec.convert(stored["boundaries"], tuple[VersionBoundary, ...]),
        schemas=_by_version(stored["schemas"]),
        lenses=cast("dict[int, dict[str, object]]", _by_version(stored["lenses"])),
    )


def _by_version(stored: object) -> dict[int, object]:
    return {int(version): value for version, value in cast("dict[str, object]", stored).items()}


def _offset_of(boundary: VersionBoundary) -> int:
    return boundary.offset


def fork_registry(registry: Registry, name: str, entry: int) -> Registry:
    """The registry of a fork that leaves its source after `entry`."""
    boundaries = tuple(VersionBoundary(min(one.offset, entry), one.version) for one in registry.boundaries)
    lenses = {version: {**lens, "schema": name} for version, lens in registry.lenses.items()}
    return msgspec.structs.replace(registry, name=name, boundaries=boundaries, lenses=lenses)


class Promoter:
    """Applies the lenses of a registry to records of older versions."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        lenses = {version: parse_lens(document) for version, document in registry.lenses.items()}
        self._lenses: dict[int, Lens] = {version: lens for version, lens in lenses.items() if version}

    def needed(self, first_sequence: int) -> bool:
        """Whether entries from `first_sequence` on may be of an older version."""
        boundaries = self._registry.boundaries
        return len(boundaries) > 1 and first_sequence < boundaries[-1].offset

    def promote(self, record: object, version: int) -> object:
        """The record in the current version. May change its argument; raises LensFailureError."""
        if version:
            for step in range(version, self._registry.version):
                record = self._lenses[step].apply(record)
        return record

    def promote_payload(self, payload: bytes | memoryview, sequence: int) -> bytes | memoryview:
        """A stored payload in the current version; unchanged if it needs no promotion."""
        version = self._registry.version_at(sequence)
        if version in (0, self._registry.version):
            return payload
        try:
            return encode_json_record(self.promote(decode_json_record(payload), version))
        except UnusableRecordError as error:
            raise LensFailureError(str(error)) from None
