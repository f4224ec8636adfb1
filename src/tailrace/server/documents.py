"""The documents of a stream that its details repeat: registry and profile, as they are durable."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import orjson

from tailrace.log.model import Stream
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.search_config import SearchConfig

PROFILE_VERSION = "durable.streams/profile/v1"
GENERIC_PROFILE = orjson.dumps({"apiVersion": PROFILE_VERSION, "profile": {"kind": "generic"}})


class StreamDocuments(NamedTuple):
    """Bodies as their own endpoints show them, and what index families have to know of them."""

    schema: bytes
    schema_bytes: int  # of one that was set
    profile: bytes
    profile_kind: str
    routing_key: bool
    search: SearchConfig | None


def read_documents(stream: Stream) -> StreamDocuments:
    found = stream.visible_documents or {}
    raw = found.get("schema")
    registry = Registry(name=stream.name) if raw is None else _load_registry(raw)
    profile = found.get("profile", GENERIC_PROFILE)
    return StreamDocuments(
        registry.to_json() if raw is None else raw,
        0 if raw is None else len(raw),
        profile,
        _load_profile_kind(profile),
        registry.routing_key is not None,
        registry.search,
    )


def read_profile_kind(stream: Stream) -> str:
    """For lists: a registry may be large and is not looked at."""
    return _load_profile_kind((stream.visible_documents or {}).get("profile", GENERIC_PROFILE))


def observability_pair(stream: Stream) -> dict[str, object]:
    """The streams that tell of the same requests as this one, if its profile names one."""
    raw = (stream.visible_documents or {}).get("profile")
    named = None if raw is None else _read_profile_pair(raw)
    if named is None:
        return {}
    kind, other = named
    events, traces = (stream.name, other) if kind == "evlog" else (other, stream.name)
    return {"observability": {"request": {"events_stream": events, "traces_stream": traces}}}


@lru_cache(maxsize=32)
def _read_profile_pair(raw: bytes) -> tuple[str, str] | None:
    """The kind of a profile, and the stream it is paired with."""
    profile = orjson.loads(raw)["profile"]
    request = profile.get("observability", {}).get("request", {})
    other = request.get("tracesStream") or request.get("eventsStream")
    return None if other is None else (str(profile["kind"]), str(other))


@lru_cache(maxsize=32)
def _load_registry(raw: bytes) -> Registry:
    return read_registry(raw)


@lru_cache(maxsize=32)
def _load_profile_kind(raw: bytes) -> str:
    return str(orjson.loads(raw)["profile"]["kind"])
