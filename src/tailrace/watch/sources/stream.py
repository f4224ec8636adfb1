"""The stream source: documents from `state-protocol` records of a stream in this or another worker.

The stream has its own history, so a copy reads it from its first entry. Documents that are not mentioned
during a copy, or during a snapshot that the stream announces, are deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, cast

from tailrace.common.timestamps import format_rfc3339
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.schema.append_validation import PROFILE_DOCUMENT
from tailrace.schema.profiles.profile import StateProtocolProfile, read_profile
from tailrace.watch.sources.connector import SeenKeys, SourceContext, SourceRunner
from tailrace.watch.sources.ingest import SourceIngest
from tailrace.watch.sources.model import GapError, SourceChange, SourceError, SourcePosition
from tailrace.watch.sources.postgres_decoder import dump_row, parse_json_value


class StateRecord(NamedTuple):
    """One record: a row of a type, or a control of the stream."""

    control: str | None
    type: str = ""
    key: str = ""
    data: bytes | None = None  # None: deleted
    txn: str | None = None
    time: str | None = None


def read_state_record(raw: bytes | memoryview) -> StateRecord | None:
    """Parse a record; None for entries from before the stream got the profile."""
    record = parse_json_value(bytes(raw).decode())
    if isinstance(record, str):
        raise SourceError("a record is nested too deep for a document")
    headers = cast("dict[str, Any]", record).get("headers") if isinstance(record, dict) else None
    if not isinstance(headers, dict):
        return None
    named, body = cast("dict[str, Any]", headers), cast("dict[str, Any]", record)
    if "control" in named:
        return StateRecord(str(named["control"]))
    operation, entity, key = named.get("operation"), body.get("type"), body.get("key")
    if not isinstance(operation, str) or not isinstance(entity, str) or not isinstance(key, str):
        return None
    data: bytes | None = None
    if operation != "delete":
        value = body.get("value")
        data = dump_row(cast("dict[str, Any]", value) if isinstance(value, dict) else {"value": value})
    return StateRecord(None, entity, key, data, named.get("txid"), named.get("timestamp"))


class OriginEntry(NamedTuple):
    seq: int
    raw: bytes | memoryview
    time_ns: int


class OriginStream(Protocol):
    """The stream that a source reads; of a remote stream, properties are as of the last response."""

    @property
    def incarnation(self) -> str: ...
    @property
    def earliest(self) -> int: ...
    @property
    def visible(self) -> int: ...
    @property
    def gone(self) -> bool: ...
    def offset(self, entry: int) -> str: ...
    async def page(self, after: int, bytes_max: int, entries_max: int) -> list[OriginEntry]: ...
    async def wait_for_entries(self) -> None:
        """Returns when there may be new entries."""
        ...

    def close(self) -> None: ...


OpenRemoteOrigin = Callable[[str], Awaitable[OriginStream]]  # opens a stream of another worker


def find_origin_stream(log: Log, name: str) -> Stream:
    """The stream, if it can be a source."""
    stream = log.find(name)
    if stream is None or stream.gone or stream.visible < 0:
        raise SourceError(f"stream {name!r} not found")
    profile = read_profile((stream.visible_documents or {}).get(PROFILE_DOCUMENT))
    if not isinstance(profile, StateProtocolProfile):
        raise SourceError(f"stream {name!r} must have the profile state-protocol")
    return stream


class LocalOriginStream:
    """A stream of this log, followed until it is closed."""

    def __init__(self, log: Log, stream: Stream) -> None:
        self._log = log
        self._stream = stream
        self._published = asyncio.Event()
        self.incarnation = f"{stream.number}"
        self.offset = stream.offset
        stream.add_reader(self)

    @property
    def earliest(self) -> int:
        return self._stream.earliest

    @property
    def visible(self) -> int:
        return self._stream.visible

    @property
    def gone(self) -> bool:
        return self._stream.removed or self._stream.gone

    def on_published(self, stream: Stream) -> None:
        self._published.set()

    async def page(self, after: int, bytes_max: int, entries_max: int) -> list[OriginEntry]:
        page = await self._log.reader.read_labelled(self._stream, after, bytes_max, entries_max)
        assert page.labels is not None
        return [OriginEntry(*row) for row in zip(page.entries(), page.parts, page.labels.times, strict=True)]

    async def wait_for_entries(self) -> None:
        await self._published.wait()
        self._published.clear()

    def close(self) -> None:
        self._stream.remove_reader(self)


class StreamConnector(SourceRunner):
    """Runs one source of kind `stream`."""

    def __init__(self, context: SourceContext, open_remote: OpenRemoteOrigin | None = None) -> None:
        super().__init__(context)
        self._log = self._registry.log
        self._types = {one.table: one.collection for one in self._config.tables}
        self._open_remote = open_remote
        self._mentioned: dict[str, SeenKeys] | None = None

    # -- a session -------------------------------------------------------------------------------------

    async def _session(self) -> None:
        origin = await self._open()
        try:
            await self._follow(origin)
        finally:
            origin.close()
            self._forget_mentioned()

    async def _open(self) -> OriginStream:
        name = self._config.stream
        if self._open_remote is not None and self._log.find(name) is None:
            return await self._open_remote(name)
        return LocalOriginStream(self._log, find_origin_stream(self._log, name))

    async def _follow(self, origin: OriginStream) -> None:
        ingest = self._states.ingest()
        ingest.offset = origin.offset
        progress, incarnation = ingest.progress, origin.incarnation
        if progress.phase in ("live", "loading") and progress.system != incarnation:
            raise GapError("the stream was deleted and created again")
        if progress.phase == "stale" and not progress.rescan:
            await self._wait_for_operator(progress.reason)
        goal: int | None = None
        if progress.phase in ("new", "stale"):
            position = SourcePosition(origin.earliest, 0, -1)
            known = progress.with_position(position).with_changes(
                system=incarnation, reason=None, rescan=False, again=origin.earliest + 1
            )
            await self._states.begin_load(ingest, known)
        if ingest.progress.phase == "loading":
            goal = origin.visible
        self._status.connected, self._status.error = True, None
        at = ingest.progress.lsn
        if ingest.progress.again:
            self._remember_mentioned()
            at = min(at, ingest.progress.again - 1)
        while True:
            if goal is not None and at >= goal:
                await self._remove_others(ingest, at)
                await self._states.end_load(ingest)
                goal = None
            if at < origin.visible:
                self._status.lag_changes = origin.visible - at
                at = await self._page(origin, ingest, at, goal)
                continue
            self._reset_backoff()
            self._status.set_caught_up(True)
            if origin.gone:
                raise SourceError(f"stream {self._config.stream!r} was deleted")
            await origin.wait_for_entries()

    async def _page(self, origin: OriginStream, ingest: SourceIngest, at: int, goal: int | None) -> int:
        if origin.earliest > at:
            raise GapError("the stream no longer has the entries after the position of the source")
        config = self._config
        changes: list[SourceChange] = []
        for seq, raw, time_ns in await origin.page(at, config.batch_bytes, config.batch_changes):
            if goal is not None and seq > goal:
                break  # after the end of the copy
            at = seq
            record = read_state_record(raw)
            if record is None:
                continue
            if record.control is None:
                if (change := self._change(seq, record, time_ns)) is not None:
                    changes.append(change)
                continue
            await ingest.follow(changes)
            changes = []
            await self._control(
                ingest, record.control, seq, format_rfc3339(time_ns), loading=goal is not None
            )
        await ingest.follow(changes)
        self._status.behind = at < origin.visible
        return at

    def _change(self, seq: int, record: StateRecord, time_ns: int) -> SourceChange | None:
        collection = self._types.get(record.type)
        if collection is None:
            return None
        if self._mentioned is not None and record.data is not None:
            self._mentioned[collection].add([record.key])
        time = record.time or format_rfc3339(time_ns)
        self._status.record_change(time)
        op = "delete" if record.data is None else "put"
        return SourceChange(seq, 0, record.txn, time, op, collection, record.key, record.data or b"")

    async def _control(
        self, ingest: SourceIngest, control: str, seq: int, time: str, *, loading: bool
    ) -> None:
        unfinished = control == "snapshot-end" and ingest.progress.again
        if seq <= ingest.progress.lsn and not unfinished:
            return  # done before; read again for the keys after it
        if control == "reset":
            if not loading:
                await self._states.reset(ingest)
            clears = [
                SourceChange(seq, n, None, time, "clear", one) for n, one in enumerate(self._types.values())
            ]
            await ingest.follow(clears)
            if not loading:
                await self._states.end_load(ingest)
        elif loading:
            return  # the copy itself is a snapshot
        elif control == "snapshot-start":
            self._remember_mentioned()
            await ingest.commit_progress(
                ingest.progress.with_changes(lsn=seq, ordinal=0, index=-1, again=seq)
            )
        elif control == "snapshot-end" and self._mentioned is not None:
            await self._remove_others(ingest, seq)

    # -- mentioned keys -------------------------------------------------------------------------------

    def _remember_mentioned(self) -> None:
        self._forget_mentioned()
        self._mentioned = {collection: SeenKeys() for collection in self._types.values()}

    def _forget_mentioned(self) -> None:
        for seen in (self._mentioned or {}).values():
            seen.close()
        self._mentioned = None

    async def _remove_others(self, ingest: SourceIngest, seq: int) -> None:
        if self._mentioned is not None:
            ingest.set_position(seq)
            for collection, seen in self._mentioned.items():
                await self._remove_unseen(ingest, self._states.collections[collection], seen)
        self._forget_mentioned()
        await ingest.commit_progress(ingest.progress.with_changes(again=0))
