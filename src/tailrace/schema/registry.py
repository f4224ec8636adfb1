"""A stream's registry: schema versions, the lenses between them, the routing key and what is searchable."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, cast

import msgspec
from msgspec import Struct

from tailrace.schema.routing import RoutingKey
from tailrace.schema.search_config import SearchConfig, parse_search_config

API_VERSION: Final = "durable.streams/schema-registry/v1"


class VersionBoundary(Struct, frozen=True):
    """The first sequence number (from 0) that was written under a version."""

    offset: int
    version: int


class Registry(Struct, frozen=True, kw_only=True):
    """Immutable: an update makes another one. `schemas` are by version, `lenses` by where they lead from."""

    name: str
    version: int = 0
    routing_key: RoutingKey | None = None
    search: SearchConfig | None = None
    boundaries: tuple[VersionBoundary, ...] = ()
    schemas: dict[int, object] = msgspec.field(default_factory=dict[int, object])
    lenses: dict[int, dict[str, object]] = msgspec.field(default_factory=dict[int, dict[str, object]])

    def version_at(self, sequence: int) -> int:
        """The version an entry was written under; 0 before the first."""
        index = bisect_right(self.boundaries, sequence, key=_offset_of)
        return self.boundaries[index - 1].version if index else 0

    def to_json(self) -> bytes:
        """The whole registry, as it is answered, stored and published. Equal registries give equal bytes."""
        shown: dict[str, object] = {
            "apiVersion": API_VERSION,
            "schema": self.name,
            "currentVersion": self.version,
        }
        if self.routing_key is not None:
            shown["routingKey"] = self.routing_key.to_json()
        if self.search is not None:
            shown["search"] = self.search.to_json()
        shown["boundaries"] = self.boundaries
        shown["schemas"] = {str(version): schema for version, schema in self.schemas.items()}
        shown["lenses"] = {str(version): lens for version, lens in self.lenses.items()}
        return msgspec.json.encode(shown)


def read_registry(document: bytes) -> Registry:
    """A registry from its stored form."""
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
    """The registry of a fork that leaves its source after `entry`: the source's, from there on its own."""
    boundaries = tuple(VersionBoundary(min(one.offset, entry), one.version) for one in registry.boundaries)
    lenses = {version: {**lens, "schema": name} for version, lens in registry.lenses.items()}
    return msgspec.structs.replace(registry, name=name, boundaries=boundaries, lenses=lenses)
