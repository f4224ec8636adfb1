"""A sorted file that is read a few rows at a time, however many rows its row groups have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from tailrace.pipeline.kernels.arrays import pa


class BatchRun:
    """An open file, of which some rows are held. `key_of` says where a row of a table belongs."""

    def __init__(self, file: Any, read_rows: int, key_of: Callable[[Any, int], Any]) -> None:
        self._batches = file.iter_batches(batch_size=read_rows, use_threads=False)
        self._key_of = key_of
        self._left = file.metadata.num_rows
        self.held: Any = None  # rows that were read and not yet taken

    @property
    def has_more(self) -> bool:
        return self._left > 0

    def fill(self) -> None:
        """Reads on if nothing is held."""
        if self.held is None and self.has_more:
            self.read()

    def read(self) -> None:
        """A few rows more."""
        found = pa.Table.from_batches([next(self._batches)])
        self._left -= found.num_rows
        self.held = found if self.held is None else pa.concat_tables([self.held, found])

    def last(self) -> Any:
        return self._key_of(self.held, self.held.num_rows - 1)

    def take(self, upto: Any) -> Any:
        """The rows with keys that are not larger; all of them if there is no bound."""
        count = self.held.num_rows
        if upto is not None:
            count = bisect_right(range(count), upto, key=lambda row: self._key_of(self.held, row))
        taken = self.held.slice(0, count)
        self.held = self.held.slice(count) if count < self.held.num_rows else None
        return taken
