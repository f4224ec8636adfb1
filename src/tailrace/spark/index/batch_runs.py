"""A sorted file that is read a few rows at a time, however many rows its row groups have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from tailrace.storage.segments.parquet import pa


class SortedRunReader:
    """An open file, of which some rows are held. `key_of` says where a row of a table belongs."""

    def __init__(self, file: Any, read_rows: int, key_of: Callable[[Any, int], Any]) -> None:
        self._batches = file.iter_batches(batch_size=read_rows, use_threads=False)
        self._key_of = key_of
        self._left = file.metadata.num_rows
        self._first: Any = None
        self.held: Any = None  # rows that were read and not yet taken
        self.last: Any = None  # the key of the last of these

    @property
    def has_more(self) -> bool:
        return self._left > 0

    def fill(self) -> None:
        """Reads on if nothing is held."""
        if self.held is None and self.has_more:
            found = pa.Table.from_batches([next(self._batches)])
            self._left -= found.num_rows
            self.last = self._key_of(found, found.num_rows - 1)
            self._hold(found)

    def take(self, upto: Any) -> Any:
        """The rows with keys that are not larger, all of them without a bound; None if there are none."""
        # Making a key takes long, and files of entries that follow each other seldom overlap.
        if upto is None or self.last <= upto:
            taken, self.held = self.held, None
            return taken
        if self._first > upto:
            return None
        count = bisect_right(range(self.held.num_rows), upto, key=lambda row: self._key_of(self.held, row))
        taken = self.held.slice(0, count)
        self._hold(self.held.slice(count))
        return taken

    def _hold(self, table: Any) -> None:
        self.held = table
        self._first = self._key_of(table, 0)
