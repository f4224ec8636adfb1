"""Which entries of a stream stay stored: those it shows itself, and older ones that forks still show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

# A run of entries: those behind the first number, up to and including the second.
EntryRange = tuple[int, int]

FOREVER = 2**62


class RetainedRanges:
    """A few runs of entries. The last one begins behind `earliest` and has no end."""

    __slots__ = ("_lasts", "_runs", "earliest")

    def __init__(self, earliest: int, reached: Iterable[EntryRange] = ()) -> None:
        self.earliest = earliest
        self._runs = merge_entry_ranges([*reached, (earliest, FOREVER)])
        self._lasts = [last for _, last in self._runs]

    def some(self, first: int, last: int) -> bool:
        """Whether at least one of these entries stays."""
        index = bisect_left(self._lasts, first)
        return index < len(self._runs) and self._runs[index][0] < last

    def all(self, first: int, last: int) -> bool:
        """Whether every one of these entries stays."""
        index = bisect_left(self._lasts, first)
        return index < len(self._runs) and self._runs[index][0] < first and last <= self._lasts[index]

    def gaps(self) -> Iterator[EntryRange]:
        """The runs in between, which go."""
        behind = 0
        for after, last in self._runs:
            if behind < after:
                yield behind, after
            behind = last


def merge_entry_ranges(runs: Sequence[EntryRange]) -> list[EntryRange]:
    """The same entries in as few runs as possible, in order."""
    found: list[EntryRange] = []
    for after, last in sorted(runs):
        if after >= last:
            continue
        if found and after <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((after, last))
    return found
