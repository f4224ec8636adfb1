"""What the hot store holds that is not sealed, found page by page on a thread."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.log.stored_streams import StoredStreams

UNSEALED_PAGE_COUNT = 200


class UnsealedStream(NamedTuple):
    number: int
    last: int
    sealed: int
    size_bytes: int
    closed: bool
    oldest_ns: int

    @property
    def entries(self) -> int:
        return self.last - self.sealed


def unsealed_streams_after(store: StoredStreams, number: int) -> list[UnsealedStream]:
    """The next streams that have entries in the hot store; fewer than a page mean that these are all."""
    found: list[UnsealedStream] = []
    with store.snapshot():
        for row in store.db.cold.hot_ranges(number, UNSEALED_PAGE_COUNT):
            stream = store.stream_by_number(row.number)
            sealed = row.last if stream is None else stream.sealed
            closed = stream is not None and stream.closed
            found.append(UnsealedStream(row.number, row.last, sealed, row.body_bytes, closed, row.oldest_ns))
    return found
