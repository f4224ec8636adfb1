"""The subscription set of a job: read once, stored under its hash, and compiled in each worker."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from tailrace.protocol import offsets
from tailrace.spark.live_queries.subscription_matcher import (
    CompiledSubscriptions,
    SubscriptionSet,
    decode_subscription_set,
)
from tailrace.spark.object_stores import ProcessCache, shared_object_store
from tailrace.spark.server_client import ServerClient
from tailrace.storage.segments.parquet import pa
from tailrace.watch.external_matching import SubscriptionSummary

SUBSCRIPTION_SETS_FOLDER: Final = "watch/index/"
COMPILED_SETS_MAX: Final = 2
PAGE_BYTES: Final = 4 << 20


def store_subscription_set(store: str, subscriptions: SubscriptionSet) -> str:
    """Store the set under its hash, which is all that tasks need. Returns the hash."""
    data = subscriptions.encode()
    name = hashlib.sha256(data).hexdigest()
    shared_object_store(store).create(SUBSCRIPTION_SETS_FOLDER + name, data)
    return name


def _load_compiled(key: tuple[str, str]) -> CompiledSubscriptions:
    store, name = key
    return CompiledSubscriptions(
        decode_subscription_set(shared_object_store(store).get(SUBSCRIPTION_SETS_FOLDER + name))
    )


_compiled_sets: ProcessCache[tuple[str, str], CompiledSubscriptions] = ProcessCache(
    _load_compiled, COMPILED_SETS_MAX
)


def shared_compiled_set(store: str, name: str) -> CompiledSubscriptions:
    """The compiled set of this process: its tasks share it."""
    return _compiled_sets.get((store, name))


class _Headers(msgspec.Struct):
    operation: str = ""
    control: str = ""


class _Message(msgspec.Struct):
    headers: _Headers
    type: str = ""
    key: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")


def fold_summaries(messages: Iterable[bytes]) -> dict[str, SubscriptionSummary]:
    """The subscriptions after all messages are applied."""
    found: dict[str, SubscriptionSummary] = {}
    for raw in messages:
        message = msgspec.json.decode(raw, type=_Message)
        if message.headers.control == "reset":
            found.clear()
        elif message.type == "sub":
            if message.headers.operation == "delete":
                found.pop(message.key, None)
            else:
                found[message.key] = msgspec.json.decode(message.value, type=SubscriptionSummary)
    return found


def read_subscription_set(
    server: ServerClient, stream: str, offset: str, database: str, collections: Iterable[str]
) -> SubscriptionSet:
    """The subscriptions of the collections as of an offset of the gateway's stream."""
    selected = set(collections)
    found = fold_summaries(_read_payloads(server, stream, offsets.parse_offset(offset)[1]))
    return SubscriptionSet(
        {key: one for key, one in found.items() if one.database == database and one.collection in selected}
    )


def _read_payloads(server: ServerClient, stream: str, through: int) -> Iterator[bytes]:
    offset: str | None = None
    reached = 0
    while reached < through:
        page = server.rows(stream, offset=offset, bytes_max=PAGE_BYTES)
        rows: Any = pa.ipc.open_stream(page.body).read_next_batch()
        entries: list[int] = rows.column("entry").to_pylist()
        payloads: list[Any] = rows.column("payload").to_pylist()
        for entry, payload in zip(entries, payloads, strict=True):
            if entry <= through:
                yield payload.encode() if isinstance(payload, str) else payload
        offset, before = page.next_offset, reached
        reached = offsets.parse_offset(page.next_offset)[1]
        if reached <= before:
            return
