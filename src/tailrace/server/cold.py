"""What the details of a stream tell about the object store and the tail index: asked of their users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tailrace.log.model import Stream
from tailrace.search.tail_index import TailIndex
from tailrace.server.descriptor import ARTIFACTS
from tailrace.server.details import DetailsRoutes
from tailrace.server.index_status import TailIndexStatus
from tailrace.storage.object_store.cache import ObjectCache
from tailrace.storage.object_store.request_stats import UploadedHead
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.model import make_stream_id


def connect_details(
    routes: DetailsRoutes, sealing: SealingService, readers: Sequence[ObjectCache], tail: TailIndex
) -> None:
    """`readers` fetch what was sealed and what was built from it."""

    def requests_of(stream: Stream) -> dict[str, Counter[str]]:
        folder = make_stream_id(stream.name, stream.incarnation)
        found = sealing.book.requests(folder)
        for parts in readers:
            for artifact, counters in parts.book.requests(folder).items():
                found[artifact] = found.get(artifact, Counter()) + counters
        return found

    def head_of(stream: Stream) -> UploadedHead | None:
        return sealing.book.head(make_stream_id(stream.name, stream.incarnation))

    def tail_of(stream: Stream) -> TailIndexStatus:
        index = tail.find(stream.number)
        if index is None:
            return TailIndexStatus()
        return TailIndexStatus(index.rows, index.bytes, index.dropped_rows, index.filling is not None)

    routes.tail_of = tail_of
    routes.requests_of = requests_of
    routes.head_of = head_of
    routes.is_in_conflict = lambda stream: stream.number in sealing.runs.conflicts
    routes.cached_of = lambda stream: cached_bytes_by_artifact(readers, stream)


def cached_bytes_by_artifact(readers: Sequence[ObjectCache], stream: Stream) -> dict[str, int]:
    """What the caches on disk hold of a stream, by artifact."""
    folder = make_stream_id(stream.name, stream.incarnation)
    caches = [parts.cache for parts in readers if parts.cache is not None]
    return {artifact: sum(cache.bytes_of(folder, artifact) for cache in caches) for artifact in ARTIFACTS}
