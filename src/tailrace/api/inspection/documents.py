"""The documents of a stream that its details repeat: registry and profile."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.log.model import Stream
from tailrace.schema.search_config import SearchConfig

SCHEMA_VERSION = "durable.streams/schema-registry/v1"
PROFILE_VERSION = "durable.streams/profile/v1"


class Documents(NamedTuple):
    """Bodies as their own endpoints show them, and what index families have to know of them."""

    schema: dict[str, object]
    schema_bytes: int
    profile: dict[str, object]
    profile_kind: str
    routing_key: bool
    search: SearchConfig | None


def documents_of(stream: Stream) -> Documents:
    schema: dict[str, object] = {
        "apiVersion": SCHEMA_VERSION,
        "schema": stream.name,
        "currentVersion": 0,
        "boundaries": [],
        "schemas": {},
        "lenses": {},
    }
    profile: dict[str, object] = {"apiVersion": PROFILE_VERSION, "profile": {"kind": "generic"}}
    return Documents(schema, 0, profile, "generic", False, None)
