"""Where a fork leaves its source."""

from __future__ import annotations

from tailrace.errors import TailraceError
from tailrace.log.decide import CreateRequest, ForkPoint, resolve
from tailrace.log.model import Stream
from tailrace.log.reader import Reader


def fork_point(reader: Reader, source: Stream | None, request: CreateRequest) -> ForkPoint:
    """Resolves the fork headers against the source, or refuses."""
    if source is None or source.visible < 0:
        raise TailraceError("not_found", f"there is no stream {request.source!r} to fork")
    if source.gone:
        raise TailraceError("source_deleted", "the source was deleted")
    if request.fork_position is None:
        entry = source.visible
    else:
        entry = resolve(source, request.fork_position, 0)
    sub = request.fork_sub
    if sub == 0:
        return ForkPoint(source, entry, b"", reader.time_of(source, entry))
    if entry >= source.visible:
        raise TailraceError("invalid_fork", "there is nothing after the fork offset to take a part of")
    if source.json:
        if entry + sub > source.visible:
            raise TailraceError("invalid_fork", "the sub-offset is past the end of the source")
        return ForkPoint(source, entry + sub, b"", reader.time_of(source, entry + sub))
    page = reader.read_now(source, entry, 1, 1)
    following = b"".join(page.parts)
    if sub > len(following):
        raise TailraceError("invalid_fork", "the sub-offset is longer than the next entry")
    return ForkPoint(source, entry, following[:sub], reader.time_of(source, entry))
