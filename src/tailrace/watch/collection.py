"""A collection: what is set about it, and how far its changes have been looked at."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.timestamps import format_rfc3339, parse_duration_s
from tailrace.watch import names
from tailrace.watch.befores import BeforeImageCache
from tailrace.watch.tally import CollectionCounters

# loading: nobody is told anything before it is live. stale: what there is may be wrong.
CollectionState = Literal["live", "loading", "lagging", "stale"]
NATIVE: Final = "native"


class Slo(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the collection's readers may expect; None takes the server's."""

    delivery_ms: int | None = None
    resume_ratio: float | None = None
    lag_ms: int | None = None
    bloom_ratio: float | None = None


class ReplicationConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What clients that replicate the collection need beside its documents."""

    # What stands in for the content of a document that its reader may not see any more.
    tombstone_fields: dict[str, Any] = {}


class CollectionConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is set about a collection; each change of it is a new one."""

    partitions: int
    source: str = NATIVE
    generation: int = 1
    read_rule: str | None = None
    write_rule: str | None = None
    rule_version: int = 0
    retention: str | None = None  # None: the server's; 0 keeps everything
    tombstone_ttl: str | None = None  # likewise
    store_before: bool = True  # False: changes do not say what was there before, and the view has to
    slo: Slo | None = None
    replication: ReplicationConfig | None = None

    def value(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @classmethod
    def of(cls, value: dict[str, Any]) -> CollectionConfig:
        return msgspec.convert(value, cls)

    def retention_s(self, limits: Limits) -> int | None:
        """How long changes are kept at least; None for ever."""
        return _duration_s(self.retention, limits.watch_retention_ms)

    def tombstone_s(self, limits: Limits) -> int | None:
        """How long a deleted document is remembered; None for ever."""
        return _duration_s(self.tombstone_ttl, limits.watch_tombstone_ms)

    def replaced(self, **changed: Any) -> CollectionConfig:
        return msgspec.structs.replace(self, **changed)


def _duration_s(text: str | None, default_ms: int) -> int | None:
    seconds = -(-default_ms // 1000) if text is None else parse_duration_s(text, "")
    return seconds or None


def check_duration(given: object, name: str) -> str | None:
    """A length of time as it is set: `7d`, `12h`, `0` for ever, or null for the server's."""
    if given is None:
        return None
    try:
        if not isinstance(given, str):
            raise TailraceError("invalid_request", name)
        parse_duration_s(given, name)
    except TailraceError:
        raise TailraceError(
            "invalid_request", f"{name} is whole seconds or <n>s, m, h or d as a text, or null"
        ) from None
    return given


def format_duration(seconds: int | None) -> str:
    """As a person would say it."""
    if seconds is None:
        return "0"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


class Collection:
    """One collection: what is set, and how far each of its partitions has been applied."""

    __slots__ = (
        "applied",
        "base",
        "befores",
        "bloom_ratio",
        "config",
        "database",
        "durable",
        "lagging",
        "name",
        "number",
        "pending",
        "published_ms",
        "purged",
        "state",
        "tally",
    )

    def __init__(self, database: str, name: str, config: CollectionConfig) -> None:
        self.database = database
        self.name = name
        self.config = config
        self.pending: CollectionConfig | None = None  # decided, and on its way to the disk
        self.number = 0  # in the view
        self.applied = [0] * config.partitions
        self.purged = [0] * config.partitions  # highest version of a tombstone that was given up
        self.base: list[int] | None = None  # where the newest published view stands
        self.published_ms = 0  # when that was
        self.befores: BeforeImageCache | None = None  # what its changes do not say themselves
        self.durable = True  # False while the record that makes it is on its way
        self.lagging = False  # some of its changes could not be applied to the view
        self.state: CollectionState = "live"
        # Of the answers of its Bloom filter, how many were wrong when a job made it last.
        self.bloom_ratio: float | None = None
        self.tally: CollectionCounters | None = None

    @property
    def decided(self) -> CollectionConfig:
        """What the next decision has to go by: durable or not."""
        return self.config if self.pending is None else self.pending

    @property
    def shown_state(self) -> CollectionState:
        """As it is told: whoever lags is not what it was before."""
        return "lagging" if self.lagging else self.state

    def stream(self, partition: int) -> str:
        return names.change_stream_name(self.database, self.name, partition)

    def streams(self) -> list[str]:
        return [self.stream(partition) for partition in range(self.config.partitions)]


def encode_config_entry(name: str, config: CollectionConfig, operation: str, now_ns: int) -> bytes:
    """A state message of `__collections__/<database>`."""
    headers = {"operation": operation, "timestamp": format_rfc3339(now_ns)}
    return orjson.dumps({"type": "collection", "key": name, "value": config.value(), "headers": headers})


def encode_database_entry(now_ns: int) -> bytes:
    """The first message of a database: it exists."""
    headers = {"operation": "insert", "timestamp": format_rfc3339(now_ns)}
    return orjson.dumps({"type": "database", "key": "", "value": {}, "headers": headers})


def encode_control_entry(control: str, generation: int, **more: Any) -> bytes:
    """An entry of a change stream that is no change; readers that do not know it pass over it."""
    return orjson.dumps({"v": 1, "kind": "control", "control": control, "generation": generation, **more})
