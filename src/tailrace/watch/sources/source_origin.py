"""The stream that a source reads, wherever it lives: in this log, or in that of another worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.schema.append_validation import PROFILE_DOCUMENT
from tailrace.schema.profiles.profile import StateProtocolProfile, read_profile
from tailrace.watch.sources.model import SourceError


class OriginEntry(NamedTuple):
    seq: int
    raw: bytes | memoryview
    time_ns: int


class OriginStream(Protocol):
    """What it says of itself is true of now, or of the last page or news."""

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
    async def news(self) -> None:
        """Returns when there may be more than before."""
        ...

    def close(self) -> None: ...


OpenRemoteOrigin = Callable[[str], Awaitable[OriginStream]]  # finds a stream that is not in this log


def find_origin_stream(log: Log, name: str) -> Stream:
    """The stream, if it can be one that documents come from."""
    stream = log.find(name)
    if stream is None or stream.gone or stream.visible < 0:
        raise SourceError(f"there is no stream {name!r}")
    profile = read_profile((stream.visible_documents or {}).get(PROFILE_DOCUMENT))
    if not isinstance(profile, StateProtocolProfile):
        raise SourceError(f"the stream {name!r} has not the profile state-protocol")
    return stream


class LocalOriginStream:
    """One of this log. It is read like by any live reader until it is closed."""

    def __init__(self, log: Log, stream: Stream) -> None:
        self._log = log
        self._stream = stream
        self._news = asyncio.Event()
        self.incarnation = f"{stream.number}"
        self.offset = stream.offset
        stream.readers = [*(stream.readers or ()), self]

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
        self._news.set()

    async def page(self, after: int, bytes_max: int, entries_max: int) -> list[OriginEntry]:
        page = await self._log.reader.read_labelled(self._stream, after, bytes_max, entries_max)
        assert page.labels is not None
        return [OriginEntry(*row) for row in zip(page.entries(), page.parts, page.labels.times, strict=True)]

    async def news(self) -> None:
        await self._news.wait()
        self._news.clear()

    def close(self) -> None:
        others = [one for one in self._stream.readers or () if one is not self]
        self._stream.readers = others or None
