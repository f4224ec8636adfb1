"""The subscriptions that a job works with: read once, fixed under a hash, compiled where they are used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from tailrace.protocol import offsets
from tailrace.spark.blobs import blobs
from tailrace.spark.live_queries.compiled import Compiled, SubscriptionSet, decode_set
from tailrace.spark.process_cache import ProcessCache
from tailrace.spark.server_client import Server
from tailrace.storage.segments.parquet import pa
from tailrace.watch.external_matching import SubscriptionSummary

FOLDER: Final = "watch/index/"
SETS_KEPT: Final = 2
PAGE_BYTES: Final = 4 << 20


def put_set(store: str, subscriptions: SubscriptionSet) -> str:
    """Puts the set under its hash, which is all that tasks are told."""
    data = subscriptions.encode()
    name = hashlib.sha256(data).hexdigest()
    blobs(store).create(FOLDER + name, data)
    return name


def _load(key: tuple[str, str]) -> Compiled:
    store, name = key
    return Compiled(decode_set(blobs(store).get(FOLDER + name)))


_sets: ProcessCache[tuple[str, str], Compiled] = ProcessCache(_load, SETS_KEPT)


def compiled_set(store: str, name: str) -> Compiled:
    """The set of this process: compiled once, kept from task to task."""
    return _sets.get((store, name))


class _Headers(msgspec.Struct):
    operation: str = ""
    control: str = ""


class _Message(msgspec.Struct):
    headers: _Headers
    type: str = ""
    key: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")


def fold(messages: Iterable[bytes]) -> dict[str, SubscriptionSummary]:
    """What is there after all messages."""
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


def read_set(
    server: Server, stream: str, upto: str, database: str, collections: Iterable[str]
) -> SubscriptionSet:
    """The subscriptions of some collections as of a position of the gateway's stream."""
    wanted = set(collections)
    found = fold(_payloads(server, stream, offsets.parse_offset(upto)[1]))
    return SubscriptionSet(
        {key: one for key, one in found.items() if one.database == database and one.collection in wanted}
    )


def _payloads(server: Server, stream: str, upto: int) -> Iterator[bytes]:
    offset: str | None = None
    reached = 0
    while reached < upto:
        page = server.rows(stream, offset=offset, bytes_max=PAGE_BYTES)
        rows: Any = pa.ipc.open_stream(page.body).read_next_batch()
        entries: list[int] = rows.column("entry").to_pylist()
        payloads: list[Any] = rows.column("payload").to_pylist()
        for entry, payload in zip(entries, payloads, strict=True):
            if entry <= upto:
                yield payload.encode() if isinstance(payload, str) else payload
        offset, before = page.next_offset, reached
        reached = offsets.parse_offset(page.next_offset)[1]
        if reached <= before:
            return
