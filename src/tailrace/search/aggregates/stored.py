"""States that stay with the file they are from: those of one rollup and interval in one row group.

A file never changes, and what is asked for is mostly asked again. So the arrays stay, within bounds, and the
text of each row once most of them were shown: then an answer is put together of what is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

from tailrace.search.aggregates.keyed import DimensionValues, StatePiece, StateRows
from tailrace.search.aggregates.shown import measure_texts
from tailrace.search.aggregates.summaries import SummaryArray
from tailrace.search.numpy_arrays import np, to_numpy
from tailrace.storage.segments.parquet import pa, pc

_OVERHEAD_BYTES: Final = 2000  # of the objects around the arrays
_WORD_BYTES: Final = 100  # of one value of a dimension


class StoredStates:
    """One row for each group. Nobody changes the arrays: answers share them."""

    def __init__(
        self,
        windows: Any,
        dimensions: Any,
        counts: Mapping[str, Any],
        summaries: Mapping[str, SummaryArray],
    ) -> None:
        self.windows = windows
        self._dimensions = dimensions  # lists of texts, as Arrow has them
        self._counts = counts
        self._summaries = summaries
        self._coded: dict[int, tuple[list[str | None], Any]] = {}
        self._texts: Any = None
        arrays = [windows, dimensions, *counts.values(), *summaries.values()]
        self.nbytes = _OVERHEAD_BYTES + sum(array.nbytes for array in arrays)

    def chosen(self, from_ms: int, to_ms: int, having: Sequence[tuple[int, str]]) -> Any:
        """The rows of some time, with some values of dimensions; None stands for all."""
        marks = (self.windows >= from_ms) & (self.windows < to_ms)
        for place, text in having:
            values, codes = self._codes(place)
            marks &= codes == values.index(text) if text in values else False
        return None if marks.all() else np.flatnonzero(marks)

    def piece(self, rows: Any, grouped: Sequence[int], known: Sequence[DimensionValues]) -> StoredPiece:
        """Some rows, by the dimensions at these places."""
        codes: list[Any] = []
        for place, texts in zip(grouped, known, strict=True):
            values, own = self._codes(place)
            codes.append(texts.coded(values)[own if rows is None else own[rows]])
        return StoredPiece(self, rows, self.windows if rows is None else self.windows[rows], codes)

    def _codes(self, place: int) -> tuple[list[str | None], Any]:
        """The different values of a dimension, and which of them each row has."""
        found = self._coded.get(place)
        if found is None:
            encoded = pc.list_element(self._dimensions, place).dictionary_encode("encode")
            found = self._coded[place] = encoded.dictionary.to_pylist(), to_numpy(encoded.indices)
            self.nbytes += found[1].nbytes + _WORD_BYTES * len(found[0])
        return found

    def arrays(self, rows: Any, codes: list[Any]) -> StatePiece:
        """Some rows in arrays of their own."""
        whole = StatePiece(self.windows, [], dict(self._counts), dict(self._summaries))
        return (whole if rows is None else whole.take(rows))._replace(codes=codes)

    def texts(self, rows: Any) -> Any:
        """The measures of some rows as JSON. Those of all rows are made, and stay."""
        found = self._texts
        if found is None:
            found = self._texts = measure_texts(self._counts, self._summaries, len(self.windows))
            self.nbytes += found.nbytes
        return found if rows is None else found.take(pa.array(rows))


class StoredPiece(NamedTuple):
    """Rows of stored states. Only what tells groups apart is its own."""

    states: StoredStates
    rows: Any  # None if these are all
    windows: Any
    codes: list[Any]

    @property
    def nbytes(self) -> int:
        return 8 * len(self.windows) * (2 + len(self.codes))

    @property
    def is_lent(self) -> bool:
        return 2 * len(self.windows) >= len(self.states.windows)

    def take(self, rows: Any) -> StoredPiece:
        places = rows if self.rows is None else self.rows[rows]
        return StoredPiece(self.states, places, self.windows[rows], [codes[rows] for codes in self.codes])

    def keep(self, marks: Any) -> StateRows:
        return self.take(np.flatnonzero(marks))

    def arrays(self) -> StatePiece:
        return self.states.arrays(self.rows, self.codes)

    def texts(self) -> Any:
        return self.states.texts(self.rows)


class StateCache:
    """The states of one file that were asked for last, bounded in bytes; several threads ask."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Hashable, StoredStates] = OrderedDict()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum([states.nbytes for states in self._kept.values()])

    def find(self, key: Hashable) -> StoredStates | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self._shrink()  # they have grown by their texts since
            return found

    def put(self, key: Hashable, states: StoredStates) -> bool:
        """Whether they are kept: not if that leaves no room for others."""
        if 2 * states.nbytes > self._bytes_max:
            return False
        with self._lock:
            self._kept[key] = states
            self._shrink()
        return True

    def _shrink(self) -> None:
        held = sum([states.nbytes for states in self._kept.values()])
        while held > self._bytes_max and len(self._kept) > 1:
            held -= self._kept.popitem(last=False)[1].nbytes
