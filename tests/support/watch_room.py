"""Watch in one process, on a real log: the test decides about the pace of clients, the clock and crashes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

from support.log_harness import LogHarness
from tailrace.auth import ANONYMOUS, Identity
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.http.exchange import Exchange
from tailrace.routing.context import Context
from tailrace.watch.access_rules import AccessRules
from tailrace.watch.collection import BeforeImageLimits, Collection, CounterRegistry
from tailrace.watch.collection_registry import CollectionRegistry, reset_after_view_loss
from tailrace.watch.collection_routes import CollectionRoutes
from tailrace.watch.document import Change
from tailrace.watch.document_writer import DocumentWrite, DocumentWriter, WriteResult
from tailrace.watch.names import PartitionPatterns, split_document_path
from tailrace.watch.realtime.envelopes import Envelope
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.realtime.session import RealtimeSession

DATABASE = "default"
PATIENCE_S = 30.0


class PacedWire:
    """The client's end of a connection: what was sent stays unsent until somebody reads it."""

    name = "ws"
    each_token = False

    def __init__(self) -> None:
        self.frames: list[Envelope] = []
        self.unsent_bytes = 0
        self.closed: int | None = None

    def send(self, envelope: Envelope, token: str | None) -> int:
        self.frames.append(envelope)
        self.unsent_bytes += len(envelope.body)
        return len(envelope.body)

    def keep_alive(self) -> int:
        return 0

    def close(self, code: int, reason: str) -> None:
        self.closed = code

    def read(self, count: int) -> list[dict[str, Any]]:
        taken, self.frames = self.frames[:count], self.frames[count:]
        self.unsent_bytes -= sum(len(frame.body) for frame in taken)
        return [json.loads(frame.body) for frame in taken]


class Heard(NamedTuple):
    """One change as it came out of the log."""

    partition: int
    seq: int
    id: str
    version: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class _Asked:
    """A request for the collection routes, and its answer."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.status = 0
        self.answer = b""

    def respond(self, status: int, _: bytes, body: bytes = b"") -> None:
        self.status, self.answer = status, body


class Room:
    """The parts of watch that one server has."""

    def __init__(self, directory: Path, **limits: int) -> None:
        self.limits = Limits(**limits)
        self.harness = LogHarness(directory, self.limits)
        self.heard: dict[str, list[Heard]] = {}
        self._open()

    def _open(self) -> None:
        harness, limits = self.harness, self.limits
        settings = Settings(limits=limits)
        self.telemetry = ServerMetrics()
        self.context = Context(settings, harness.log, harness.clock, harness.loop, self.telemetry, "test")
        self.book = CollectionRegistry(
            harness.log,
            harness.directory / "watch.db",
            PartitionPatterns("", limits.watch_partitions),
            BeforeImageLimits(limits.watch_window_changes, limits.watch_window_bytes, limits.watch_window_ms),
            CounterRegistry(limits.watch_metrics_collections),
        )
        self.writer = DocumentWriter(self.book, document_bytes=limits.watch_document_bytes)
        self.access = AccessRules()

        async def started(gateway: Gateway) -> None:
            self.book.on_applied = self._applied
            self.book.on_page = gateway.on_page
            self.book.on_before_image_lost = gateway.on_before_image_lost
            self.book.on_view_lost = lambda collection: reset_after_view_loss(self.book, collection)
            await self.book.start()
            gateway.start()
            await harness.log.committer.drain()

        self.heard.clear()
        self.gateway = harness.call(lambda: Gateway(self.context, self.book, self.access, None))
        harness.run(started(self.gateway))
        self.routes = CollectionRoutes(
            self.context, self.book, self.access, self.gateway.on_rules, self._removed
        )

    def _applied(self, collection: Collection, change: Change) -> None:
        self.writer.on_applied(collection, change)
        self.gateway.on_applied(collection, change)
        entry = change.entry
        one = Heard(
            change.partition, change.seq, entry.documentKey, entry.version, change.before, change.after
        )
        self.heard.setdefault(self.life_of(collection.name), []).append(one)

    def _removed(self, collection: Collection) -> None:
        self.writer.forget(collection)
        self.gateway.invalidate_all(collection, "generation")

    # -- what happens ----------------------------------------------------------------------------------

    def write(self, *writes: tuple[str, str, Any], atomic: bool = False) -> list[WriteResult]:
        """Operations, paths and data; all in one request."""
        answers: list[list[WriteResult]] = []

        def answer(results: list[WriteResult], error: TailraceError | None) -> None:
            assert error is None
            answers.append(results)

        listed = [
            DocumentWrite(cast("Any", op), split_document_path(path), data if op != "delete" else None)
            for op, path, data in writes
        ]
        self.harness.call(lambda: self.writer.write(DATABASE, listed, lambda *_: None, answer, atomic=atomic))
        self.harness.settle()
        (results,) = answers
        return results

    def configure(self, name: str, **given: Any) -> _Asked:
        asked = _Asked(json.dumps(given).encode())
        self.harness.call(lambda: self.routes.configure(cast("Exchange", asked), ANONYMOUS, DATABASE, name))
        self.harness.settle()
        return asked

    def remove(self, name: str) -> int:
        asked = _Asked(b"")
        self.harness.call(lambda: self.routes.delete(cast("Exchange", asked), ANONYMOUS, DATABASE, name))
        self.harness.settle()
        return asked.status

    def connect(self, identity: Identity = ANONYMOUS) -> tuple[RealtimeSession, PacedWire]:
        wire = PacedWire()
        session = self.harness.call(lambda: RealtimeSession(self.gateway, wire, identity, DATABASE))
        return session, wire

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.harness.run(asyncio.sleep(0))

    def until(self, holds: Any) -> None:
        """Lets the loop run until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it does not come to that"
            self.harness.run(asyncio.sleep(0.001))

    def checkpoint(self) -> None:
        self.harness.call(self.harness.log.rotate_journal)
        self.harness.settle()
        self.harness.checkpoint(tell=True)

    def crash(self, turns: int) -> None:
        """A power cut: all connections are gone, and what was not durable with them."""
        old = self.book
        for session in tuple(self.gateway.sessions):
            self.harness.call(session.on_gone)
        self.turn(2)
        self.harness.crash(turns=turns)
        old.close()
        self._open()

    def close(self) -> None:
        for session in tuple(self.gateway.sessions):
            self.harness.call(session.on_gone)
        self.harness.call(self.gateway.close_all)
        self.turn(2)
        self.book.close()
        self.harness.close()

    # -- what there is ---------------------------------------------------------------------------------
    def life_of(self, name: str) -> str:
        """A collection by its name and generation: another life is another collection."""
        collection = self.book.find(DATABASE, name)
        if collection is None:
            return f"{name} {self.book.next_generation(DATABASE, name)}"
        return f"{name} {self.book.generation(collection)}"

    def rule_of(self, name: str) -> str | None:
        collection = self.book.find(DATABASE, name)
        return None if collection is None else collection.config.read_rule

    def rows(self, name: str) -> dict[str, tuple[int, bytes]]:
        """Living documents as the view has them."""
        collection = self.book.find(DATABASE, name)
        if collection is None:
            return {}
        found = self.book.view.current.documents_after(collection.number, "", 100_000)
        return {row.id: (row.version, row.data) for row in found}
