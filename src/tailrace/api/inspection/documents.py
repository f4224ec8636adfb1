"""The documents of a stream that its details repeat: registry and profile, as they are durable."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import orjson

from tailrace.log.model import Stream
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.search_config import SearchConfig

PROFILE_VERSION = "durable.streams/profile/v1"
GENERIC = orjson.dumps({"apiVersion": PROFILE_VERSION, "profile": {"kind": "generic"}})


class Documents(NamedTuple):
    """Bodies as their own endpoints show them, and what index families have to know of them."""

    schema: bytes
    schema_bytes: int  # of one that was set
    profile: bytes
    profile_kind: str
    routing_key: bool
    search: SearchConfig | None


def documents_of(stream: Stream) -> Documents:
    found = stream.visible_documents or {}
    raw = found.get("schema")
    registry = Registry(name=stream.name) if raw is None else _registry(raw)
    profile = found.get("profile", GENERIC)
    return Documents(
        registry.to_json() if raw is None else raw,
        0 if raw is None else len(raw),
        profile,
        _profile_kind(profile),
        registry.routing_key is not None,
        registry.search,
    )


def profile_kind_of(stream: Stream) -> str:
    """For lists: a registry may be large and is not looked at."""
    return _profile_kind((stream.visible_documents or {}).get("profile", GENERIC))


@lru_cache(maxsize=32)
def _registry(raw: bytes) -> Registry:
    return read_registry(raw)


@lru_cache(maxsize=32)
def _profile_kind(raw: bytes) -> str:
    return str(orjson.loads(raw)["profile"]["kind"])
