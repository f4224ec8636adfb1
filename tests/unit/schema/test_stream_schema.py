"""Registries at work: entries that cannot be promoted, pages that grow, and what is kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace import __version__
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.http.live_transport import SseEventTransport
from tailrace.log.decide import AppendRequest
from tailrace.log.model import Stream
from tailrace.log.reader import Page
from tailrace.routing.context import Context
from tailrace.schema import stream_schema
from tailrace.schema.registry import Registry, RoutingKey, VersionBoundary
from tailrace.schema.stream_schema import PROMOTED_PAGE_BYTES, StreamSchema, StreamSchemaCache
from tailrace.server.live import Follower, LiveReaders

JSON = "application/json"


def document(*ops: Any, boundary: int = 3, **more: Any) -> bytes:
    lens = {"apiVersion": "durable.lens/v1", "schema": "s", "from": 1, "to": 2, "ops": list(ops)}
    registry = Registry(
        name="s",
        version=2,
        boundaries=(VersionBoundary(0, 1), VersionBoundary(boundary, 2)),
        schemas={1: True, 2: True},
        lenses={1: lens},
    )
    return msgspec.structs.replace(registry, **more).to_json()


RENAME = {"op": "rename", "from": "/a", "to": "/b"}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits())
    harness.create("s", JSON, (None, None), Append([], None), None)
    harness.settle()
    yield harness
    harness.close()


def stream_of(log: LogHarness) -> Stream:
    stream = log.find("s")
    assert stream is not None
    return stream


def test_an_entry_that_cannot_be_promoted_is_named(log: LogHarness) -> None:
    contract = StreamSchema(document(RENAME), 100)
    parts: list[Any] = [b'{"a":1}', b"{}", b'{"a":3}', b"{}"]
    with pytest.raises(TailraceError) as caught:
        contract.promoted(stream_of(log), 0, Page(parts, 4, 4))
    offset = stream_of(log).offset(2)
    assert caught.value.code == "invalid_request"
    assert caught.value.message == f"lens promotion failed at offset {offset}: /a is absent"
    page = contract.promoted(stream_of(log), 2, Page(parts[2:], 4, 2))
    assert page.parts == [b'{"b":3}', b"{}"]
    as_stored = Page([b"{}"], 4, 1)
    assert contract.promoted(stream_of(log), 3, as_stored) is as_stored


def test_a_page_that_grows_by_promotion_ends_early(log: LogHarness) -> None:
    add = {"op": "add", "path": "/b", "schema": True, "default": "x" * (PROMOTED_PAGE_BYTES // 2)}
    contract = StreamSchema(document(add, boundary=10), 100)
    page = contract.promoted(stream_of(log), 0, Page([b"{}"] * 10, 10, 10))
    assert (page.count, page.next_entry, len(page.parts)) == (2, 2, 2)
    keyed = contract.promoted(stream_of(log), 0, Page([b"{}"] * 5, 10, 5, [2, 4, 6, 8, 10]))
    assert (keyed.count, keyed.next_entry) == (2, 5), "what lies between has other keys"


def test_what_pages_depend_on() -> None:
    contract = StreamSchema(document(RENAME), 100)
    assert contract.version_tag(Page([], 1, 1)) == "v2"
    assert (
        StreamSchema(document(RENAME, boundaries=(VersionBoundary(5, 2),)), 100).version_tag(Page([], 5, 5))
        == ""
    )
    keys = Registry(name="s", routing_key=RoutingKey("/a", False)).to_json()
    assert StreamSchema(keys, 100).version_tag(Page([], 5, 5)) == ""


def test_contracts_are_made_once_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    first = document(RENAME)
    monkeypatch.setattr(stream_schema, "CACHE_BYTES", len(first) + 10)
    kept = StreamSchemaCache(100)
    assert kept.get(None) is kept.get({}) is kept.get({"profile": b""}) is None
    contract = kept.get({"schema": first})
    assert contract is not None
    assert kept.get({"schema": bytes(bytearray(first))}) is contract
    kept.get({"schema": document(RENAME, boundary=4)})
    assert kept.get({"schema": first}) is not contract


def test_streams_that_hold_no_json_are_left_alone(log: LogHarness) -> None:
    strict = Registry(name="s", version=1, boundaries=(VersionBoundary(0, 1),), schemas={1: False}).to_json()
    kept, stream = StreamSchemaCache(100), Stream(5, "text", 0)
    stream.documents = {"schema": strict}
    stream.bind("text/plain")
    assert kept.validate_append(AppendRequest(b"x", "text/plain"), stream) is None
    stream.bind(None)
    assert kept.validate_append(AppendRequest(b"x", "text/plain"), stream) is None
    with pytest.raises(TailraceError):
        kept.validate_append(AppendRequest(b"1", JSON), stream)


class Socket(SseEventTransport):
    """A connection that only remembers how it ended."""

    def __init__(self) -> None:
        self.form = "sse-text"
        self.sent: list[bytes] = []
        self.ended_with: int | None = None

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        return payload or b""

    def send(self, encoded: bytes) -> None:
        self.sent.append(encoded)

    def end(self, code: int) -> None:
        self.ended_with = code

    @property
    def unsent_bytes(self) -> int:
        return 0


def test_a_follower_is_sent_away_from_an_entry_that_cannot_be_shown(log: LogHarness) -> None:
    log.append("s", Append([b'{"a":1}', b"{}"], JSON))
    log.settle()
    stream = stream_of(log)
    log.call(log.log.describe, stream, "schema", document(RENAME))
    log.settle()
    context = Context(Settings(), log.log, log.clock, log.loop, ServerMetrics(__version__), "id")
    live = LiveReaders(context)

    def follow(after: int) -> Socket:
        socket = Socket()
        follower = Follower(live, stream, after, "", None, 60.0)
        live.add(follower)
        log.call(lambda: follower.start(socket))
        return socket

    assert follow(0).ended_with == 1011
    assert follow(2).ended_with is None
