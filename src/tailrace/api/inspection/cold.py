"""What the details of a stream tell about the object store and the tail index: asked of their users."""

from __future__ import annotations

from collections import Counter

from tailrace.api.inspection.details import DetailsRoutes
from tailrace.api.inspection.index_status import TailRows
from tailrace.log.model import Stream
from tailrace.query.tail_index import TailIndex
from tailrace.store.cold import ColdReader
from tailrace.store.object_book import RecordedHead
from tailrace.store.segments import stream_id
from tailrace.tier.seal import Sealing


def connect_details(routes: DetailsRoutes, sealing: Sealing, cold: ColdReader, tail: TailIndex) -> None:
    def requests_of(stream: Stream) -> dict[str, Counter[str]]:
        folder = stream_id(stream.name, stream.incarnation)
        found = sealing.book.requests(folder)
        for artifact, counters in cold.parts.book.requests(folder).items():
            found[artifact] = found.get(artifact, Counter()) + counters
        return found

    def head_of(stream: Stream) -> RecordedHead | None:
        return sealing.book.head(stream_id(stream.name, stream.incarnation))

    def cached_bytes_of(stream: Stream) -> int:
        cache = cold.parts.cache
        return 0 if cache is None else cache.bytes_of(stream_id(stream.name, stream.incarnation))

    def tail_of(stream: Stream) -> TailRows:
        index = tail.find(stream.number)
        if index is None:
            return TailRows()
        return TailRows(index.rows, index.bytes, index.dropped_rows)

    routes.tail_of = tail_of
    routes.requests_of = requests_of
    routes.head_of = head_of
    routes.cached_bytes_of = cached_bytes_of
