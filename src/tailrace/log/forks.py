"""The fork point: the position at which a fork diverges from its source."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.common.errors import TailraceError
from tailrace.log.decide import CreateRequest, ForkPoint, offset_gone, resolve_position
from tailrace.log.group_commit import refuse_after_commit
from tailrace.log.history import FetchedBlock
from tailrace.log.model import Stream
from tailrace.log.reader import Reader


def fork_point(
    reader: Reader, source: Stream, request: CreateRequest, fetched: Sequence[FetchedBlock]
) -> ForkPoint:
    """Resolves the fork headers against the source; raises if they are not valid.

    Raises NotLocalError if it needs an entry from the object store that is not in `fetched`.
    """
    if source.gone:
        raise refuse_after_commit(TailraceError("source_deleted", "the source was deleted"), source.batch)
    if request.fork_position is None:
        entry = source.visible
    else:
        # A fork at the start inherits nothing, so retention of the source does not matter.
        earliest = source.earliest if request.fork_position != (0, 0) else 0
        entry = resolve_position(source, request.fork_position, earliest)
    sub = request.fork_sub
    if sub == 0:
        return ForkPoint(source, entry, b"", reader.time_of(source, entry, fetched))
    if entry >= source.visible:
        raise TailraceError("invalid_fork", "the source has no entry after the fork offset")
    if source.json:
        if entry + sub > source.visible:
            raise TailraceError("invalid_fork", "the sub-offset is past the end of the source")
        if entry + sub < source.earliest:
            raise offset_gone(source, source.earliest)
        return ForkPoint(source, entry + sub, b"", reader.time_of(source, entry + sub, fetched))
    if entry < source.earliest:
        raise offset_gone(source, source.earliest)
    following = reader.read_entry(source, entry + 1, fetched)
    if sub > len(following):
        raise TailraceError("invalid_fork", "the sub-offset is longer than the next entry")
    return ForkPoint(source, entry, following[:sub], reader.time_of(source, entry, fetched))
