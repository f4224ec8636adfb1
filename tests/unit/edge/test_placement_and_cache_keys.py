"""The parts of an edge that need no network: placement, cache keys, facts, batches."""

from __future__ import annotations

import asyncio

import pytest

from support.ports import free_port
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.settings import SettingsError
from tailrace.edge.cache import MemoryCache, Slice
from tailrace.edge.metrics import EdgeTelemetry
from tailrace.edge.requests import parse_read, parse_target
from tailrace.edge.slices import slice_key
from tailrace.edge.stream_info import StreamInfoCache
from tailrace.edge.upstream_feed import FeedBatch
from tailrace.edge.upstream_pool import parse_upstreams
from tailrace.edge.upstreams import Upstreams, placement_key, rendezvous_order
from tailrace.protocol import offsets


def test_taking_an_upstream_away_moves_only_its_streams() -> None:
    ids = ["a", "b", "c", "d"]
    names = [f"stream/{number}" for number in range(2000)]
    before = {name: rendezvous_order(name, ids)[0] for name in names}
    after = {name: rendezvous_order(name, ["a", "b", "d"])[0] for name in names}
    moved = {name for name in names if before[name] != after[name]}
    assert moved == {name for name in names if before[name] == "c"}
    assert 300 < len(moved) < 700


def test_partitions_of_a_collection_go_together() -> None:
    assert placement_key("__changes__/db/orders/3") == placement_key("__changes__/db/orders/4")
    assert placement_key("orders/3") == "orders/3"


@pytest.mark.parametrize(
    ("path", "kind", "name", "key"),
    [
        (b"/v1/stream/a/b", "stream", "a/b", None),
        (b"/v1/stream/a%2Fb", "stream", "a/b", None),
        (b"/v1/stream/a/pk/k%2Fx", "stream", "a", "k/x"),
        (b"/v1/stream/a/_schema", "resource", "a", None),
        (b"/v1/stream/a/touch/wait", "resource", "a", None),
        (b"/v1/stream/a/_otlp/v1/traces", "resource", "a", None),
        (b"/v1/stream/__ds/subscriptions/x", "other", "__ds", None),
        (b"/v1/stream/__registry__", "reserved", "__registry__", None),
        (b"/v1/stream/hub/topic/x", "reserved", "hub/topic/x", None),
        (b"/v1/stream/a//b", "other", "", None),
        (b"/v1/streams", "other", "", None),
        (b"/v1/server/_details", "server", "", None),
        (b"/hub/ws", "other", "", None),
    ],
)
def test_paths(path: bytes, kind: str, name: str, key: str | None) -> None:
    assert parse_target(path, 1024) == (kind, name, key)


def test_reads_that_are_the_same_have_one_key() -> None:
    target = parse_target(b"/v1/stream/a", 1024)
    position = offsets.encode_offset(0, 7).encode()
    spellings = (
        b"offset=" + position,
        b"offset=" + position.lower(),
        b"offset=0000000000000000_0000000000000007&unknown=1",
        b"cursor=5&timeout=3&offset=" + position + b"&live=",
    )
    readings = [parse_read(target, spelling, {}) for spelling in spellings]
    assert len({slice_key(reading) for reading in readings if reading is not None}) == 1
    keyed = parse_read(parse_target(b"/v1/stream/a/pk/x", 1024), b"", {})
    assert keyed is not None
    also = parse_read(target, b"key=x&offset=-1", {})
    assert also is not None
    assert slice_key(keyed) == slice_key(also)
    others = (b"", b"format=raw", b"key=y", b"filter=a:1", b"offset=0000000000000000_0000000000000007")
    found = [parse_read(target, other, {}) for other in others]
    assert len({slice_key(reading) for reading in found if reading is not None}) == len(others)


@pytest.mark.parametrize(
    "query", [b"offset=now", b"since=5", b"live=sse", b"format=arrow", b"offset=-1&live=long-poll&filter=a:1"]
)
def test_reads_that_only_the_owner_answers(query: bytes) -> None:
    assert parse_read(parse_target(b"/v1/stream/a", 1024), query, {}) is None


@pytest.mark.parametrize("query", [b"offset=17", b"offset=-1&offset=-1", b"live=x", b"offset="])
def test_reads_that_every_server_refuses(query: bytes) -> None:
    with pytest.raises(TailraceError):
        parse_read(parse_target(b"/v1/stream/a", 1024), query, {})


def test_upstreams_as_they_are_written() -> None:
    origins = parse_upstreams("http://a:1, b=https://b.example ,http://[::1]:9")
    assert [origin.id for origin in origins] == ["http://a:1", "b", "http://[::1]:9"]
    assert [origin.host_header for origin in origins] == [b"a:1", b"b.example:443", b"[::1]:9"]
    for text in ("", "a:1", "ftp://a", "http://a/path", "http://me:secret@a", "http://a:1,http://a:1"):
        with pytest.raises(SettingsError):
            parse_upstreams(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://me:hunter2@a",
        "http://hunter2@a:1",
        "http://a:1,http://me:hunter2@b",
        "http://me:1,hunter2@b:1",
        "b=http://me:x/hunter2@b",
        "http://a:1?token=hunter2",
    ],
)
def test_a_password_in_an_upstream_is_not_shown(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_upstreams(text)
    assert "hunter2" not in str(refused.value)


def test_a_higher_epoch_drops_what_was_known() -> None:
    dropped: list[tuple[str, str]] = []
    book = StreamInfoCache(lambda name, reason: dropped.append((name, reason)))
    book.note_batch("a", offsets.encode_offset(0, 5))
    generation = book.get("a").generation
    book.note_batch("a", offsets.encode_offset(0, 9))
    assert not dropped
    book.note_batch("a", offsets.encode_offset(1, 2))
    assert dropped == [("a", "epoch")]
    assert book.get("a").generation == generation + 1
    assert book.get("a").end == offsets.encode_offset(1, 2)


def test_writes_are_fenced() -> None:
    book = StreamInfoCache(lambda _name, _reason: None)
    writes = book.get("a").writes
    book.note_write("a", b"POST", 204)
    assert book.get("a").writes > writes
    generation = book.get("a").generation
    book.note_write("a", b"DELETE", 204)
    assert book.get("a").generation > generation


def test_memory_keeps_its_bound_and_forgets_the_least_used() -> None:
    telemetry = EdgeTelemetry()
    cache = MemoryCache(10_000, telemetry)
    slices = {number: Slice([], b"x" * 1000, 0.0) for number in range(8)}
    for number, found in slices.items():
        cache.put(("stream", str(number)), found)
        cache.get(("stream", "0"))
    assert cache.bytes <= 10_000
    assert cache.get(("stream", "0")) is slices[0]
    assert cache.get(("stream", "1")) is None
    cache.drop("stream")
    assert cache.bytes == 0
    cache.put(("stream", "large"), Slice([], b"x" * 20_000, 0.0))
    assert cache.bytes == 0


def test_a_batch_is_encoded_once_per_form() -> None:
    batch = FeedBatch("0", "1", b'[{"n":1}]', True, "7", closed=False)
    assert batch.event("sse") is batch.event("sse")
    assert b'"upToDate":true' in batch.encode("sse", "7", True)
    assert b"upToDate" not in batch.encode("sse", "7", False)
    assert b'"upToDate":false' in batch.encode("ws", "7", False)
    assert b'"streamCursor":"99"' in batch.encode("sse", "99", True)


def test_an_upstream_that_nobody_has_seen_yet_does_not_make_an_edge_ready() -> None:
    async def started() -> bool:
        upstreams = Upstreams(parse_upstreams(f"http://127.0.0.1:{free_port()}"), "any", Limits(), b"edge")
        await upstreams.start()
        try:
            return upstreams.ready
        finally:
            await upstreams.stop()

    assert not asyncio.run(started())
