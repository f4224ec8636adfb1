"""The streams that a read covers, with their positions, and the segments that hold their older entries.

Used on the driver while a read is planned. Nothing in here is sent to executors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tailrace.client.model import StreamDescriptor, StreamInfo, is_json
from tailrace.client.wire import OCTETS_TYPE
from tailrace.common.logging_setup import log_fields
from tailrace.protocol import offsets
from tailrace.protocol.stream_names import NamePattern
from tailrace.spark.options import STREAMS_MAX, OptionError, ReadOptions
from tailrace.spark.server_client import ServerClient, shared_client
from tailrace.storage.manifests.model import ManifestError
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStoreError, open_object_store
from tailrace.storage.segments.model import SegmentInfo, stream_prefix

logger = logging.getLogger("tailrace.spark")

SEGMENTS_TTL_S = 5.0  # a segment list is reloaded after this time if it ends before the requested entry


class Position(NamedTuple):
    """A position between two entries. Positions compare like their offsets."""

    epoch: int
    entry: int

    @property
    def offset(self) -> str:
        return offsets.encode_offset(self.epoch, self.entry)


STREAM_START = Position(0, 0)


def position_from_offset(offset: str) -> Position:
    return Position(*offsets.parse_offset(offset))


class StreamState(NamedTuple):
    """The state of a stream at the time of the request."""

    name: str
    content_type: str
    earliest: Position
    tail: Position

    @property
    def json(self) -> bool:
        return is_json(self.content_type)


class SealedSegment(NamedTuple):
    """A segment and the key prefix of its object."""

    prefix: str
    info: SegmentInfo


class SchemaVersions(NamedTuple):
    """The schema versions of a stream: pairs of first entry and version."""

    firsts: tuple[tuple[int, int], ...] = ()
    registry: bytes | None = None  # the schema registry, to promote entries of older versions

    def needs_promotion_after(self, entry: int) -> bool:
        return len(self.firsts) > 1 and entry + 1 < self.firsts[-1][0]


class StreamCatalogue:
    """Stream states from the server and segment lists from the object store; caches the segment lists."""

    def __init__(self, options: ReadOptions, server: ServerClient | None = None) -> None:
        self._options = options
        self.server = server or shared_client(options.connection)
        self._pattern = None if options.pattern is None else NamePattern(options.pattern)
        self._sealed: dict[str, _SealedSegments] = {}

    # -- streams ---------------------------------------------------------------------------------------

    def list_states(self) -> dict[str, StreamState]:
        """The streams of this read by name. A named stream that does not exist is left out."""
        found = self._matching() if self._pattern is not None else self._named()
        return {state.name: state for state in found}

    def _named(self) -> Iterator[StreamState]:
        for name in self._options.streams:
            info = self.server.head(name)
            if info is not None:
                yield _state_from_info(info)

    def _matching(self) -> Iterator[StreamState]:
        assert self._pattern is not None
        count = 0
        for row in self.server.list_streams(self._pattern.prefix):
            if not self._pattern.matches(row.name):
                continue
            count += 1
            if count > STREAMS_MAX:
                raise OptionError(
                    f"streamPattern {self._pattern.text!r} matches more than {STREAMS_MAX} streams; narrow it"
                )
            yield _state_from_listing(row)

    def state(self, name: str) -> StreamState | None:
        info = self.server.head(name)
        return None if info is None else _state_from_info(info)

    # -- history ---------------------------------------------------------------------------------------

    def versions(self, state: StreamState) -> SchemaVersions:
        """The schema versions of the stream's entries."""
        document = self.server.get_registry(state.name) if state.json else None
        if document is None:
            return SchemaVersions()
        registry = msgspec.json.decode(document, type=_Registry)
        return SchemaVersions(tuple((one.offset + 1, one.version) for one in registry.boundaries), document)

    def store_url(self, name: str) -> str | None:
        """The URL of the store with the stream's objects; None if they cannot be read from here."""
        sealed = self._sealed_segments(name)
        return None if sealed is None else sealed.store

    def segments(self, name: str, after: int, through: int) -> list[SealedSegment]:
        """The segments with entries in the range, oldest first.

        Entries in no segment come from the server.
        """
        sealed = self._sealed_segments(name, through)
        if sealed is None:
            return []
        return [
            SealedSegment(sealed.prefix, info)
            for info in sealed.segments
            if info.last > after and info.first <= through
        ]

    def _sealed_segments(self, name: str, through: int = 0) -> _SealedSegments | None:
        known = self._sealed.get(name)
        now_s = time.monotonic()
        if known is not None and (known.reach >= through or now_s - known.loaded_s < SEGMENTS_TTL_S):
            return known if known.store else None
        found = self._load_sealed(name, now_s)
        self._sealed[name] = found
        return found if found.store else None

    def _load_sealed(self, name: str, now_s: float) -> _SealedSegments:
        location = self.server.locate(name)
        if location is None:
            return _SealedSegments("", "", (), 0, now_s)
        url, planned = location
        url = self._options.store or url
        try:
            segments = asyncio.run(_load_segments(url, planned.stream_id))
        except (ObjectStoreError, ManifestError, ValueError) as error:
            logger.warning(
                "object store unavailable, reading from server",
                extra=log_fields(stream=name, error=str(error)),
            )
            return _SealedSegments("", "", (), 0, now_s)
        reach = segments[-1].last if segments else 0
        return _SealedSegments(url, stream_prefix(planned.stream_id), segments, reach, now_s)


class _SealedSegments(NamedTuple):
    store: str  # empty if the segments cannot be used
    prefix: str
    segments: tuple[SegmentInfo, ...]
    reach: int
    loaded_s: float


class _Boundary(msgspec.Struct):
    offset: int
    version: int


class _Registry(msgspec.Struct):
    boundaries: list[_Boundary] = []


async def _load_segments(url: str, stream_id: str) -> tuple[SegmentInfo, ...]:
    """The segments listed in the stream's manifest."""
    objects = open_object_store(url)
    try:
        manifests = ManifestStore(objects, 0)
        stored = await manifests.load(stream_id)
        if stored is None or stored.head.deleted is not None:
            return ()
        return tuple([info async for info in manifests.segments(stored.head)])
    finally:
        await objects.close()


def _state_from_info(info: StreamInfo) -> StreamState:
    earliest = STREAM_START if info.earliest_offset is None else position_from_offset(info.earliest_offset)
    return StreamState(info.name, info.content_type, earliest, position_from_offset(info.next_offset))


def _state_from_listing(row: StreamDescriptor) -> StreamState:
    tail = row.end_offset or offsets.START_OFFSET  # `next_offset` of a listing is a count
    earliest = STREAM_START if row.earliest_offset is None else position_from_offset(row.earliest_offset)
    return StreamState(row.name, row.content_type or OCTETS_TYPE, earliest, position_from_offset(tail))
