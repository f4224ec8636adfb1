"""What the hot store holds that is not sealed, found page by page on a thread."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.log.stored_streams import StoredStreams

PAGE_COUNT = 200


class Leftover(NamedTuple):
    number: int
    last: int
    sealed: int
    size_bytes: int
    closed: bool
    oldest_ns: int

    @property
    def entries(self) -> int:
        return self.last - self.sealed


def leftovers_after(store: StoredStreams, number: int) -> list[Leftover]:
    """The next streams that have entries in the hot store; fewer than a page mean that these are all."""
    found: list[Leftover] = []
    with store.snapshot():
        for row in store.db.cold.hot_ranges(number, PAGE_COUNT):
            stream = store.stream_by_number(row.number)
            sealed = row.last if stream is None else stream.sealed
            closed = stream is not None and stream.closed
            found.append(Leftover(row.number, row.last, sealed, row.body_bytes, closed, row.oldest_ns))
    return found
