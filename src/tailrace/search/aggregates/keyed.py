"""States by window and group: what rollups and columns gave, until it is shown.

What comes in is kept as it comes, in pieces. Most groups come once; those that come again are taken out of
their pieces, merged, and become a piece of their own. A piece may be of what a file keeps (`states.stored`):
then nothing of it is copied unless it has to be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

from tailrace.search.aggregates.shown import measure_texts
from tailrace.search.aggregates.summaries import SummaryArray, concat_summaries
from tailrace.search.numpy_arrays import np

UNSETTLED_ROWS_MAX: Final = 200_000
CHECKED_ROWS: Final = 100_000
UNSETTLED_BYTES_MAX: Final = 32 << 20

GroupKey = tuple[int, tuple[str | None, ...]]  # the start of the window, and the values of `group_by`


class StateRows(Protocol):
    """States of some groups, one row for each."""

    @property
    def windows(self) -> Any: ...
    @property
    def codes(self) -> list[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_lent(self) -> bool:
        """Whether it is most of what somebody keeps, texts and all, and is best left as it is."""
        ...

    def take(self, rows: Any) -> StateRows: ...
    def keep(self, marks: Any) -> StateRows: ...
    def arrays(self) -> StatePiece: ...
    def texts(self) -> Any:
        """The measures of each row as JSON, in the order of their names."""
        ...


class StatePiece(NamedTuple):
    """States of some groups in arrays of their own."""

    windows: Any
    codes: list[Any]  # for each dimension that groups are by, the code of its value
    counts: dict[str, Any]  # by measure
    summaries: dict[str, SummaryArray]

    @property
    def is_lent(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        lists = 8 * len(self.windows) * (1 + len(self.codes) + len(self.counts))
        return lists + sum(found.nbytes for found in self.summaries.values())

    def arrays(self) -> StatePiece:
        return self

    def texts(self) -> Any:
        return measure_texts(self.counts, self.summaries, len(self.windows))

    def take(self, rows: Any) -> StatePiece:
        return StatePiece(
            self.windows[rows],
            [codes[rows] for codes in self.codes],
            {name: counts[rows] for name, counts in self.counts.items()},
            {name: found.take(rows) for name, found in self.summaries.items()},
        )

    def keep(self, marks: Any) -> StatePiece:
        """The marked rows."""
        return StatePiece(
            self.windows[marks],
            [codes[marks] for codes in self.codes],
            {name: counts[marks] for name, counts in self.counts.items()},
            {name: found.keep(marks) for name, found in self.summaries.items()},
        )

    def merged(self, group_of: Any, groups: int) -> StatePiece:
        """One row for each group. Rows of a group have the same key."""
        lead = np.empty(groups, np.int64)
        lead[group_of] = np.arange(len(group_of))
        sums = {name: np.zeros(groups, np.int64) for name in self.counts}
        for name, counts in self.counts.items():
            np.add.at(sums[name], group_of, counts)
        return StatePiece(
            self.windows[lead],
            [codes[lead] for codes in self.codes],
            sums,
            {name: found.merged(group_of, groups) for name, found in self.summaries.items()},
        )


def concat_pieces(pieces: Sequence[StatePiece]) -> StatePiece:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    return StatePiece(
        np.concatenate([piece.windows for piece in pieces]),
        [np.concatenate([piece.codes[place] for piece in pieces]) for place in range(len(first.codes))],
        {name: np.concatenate([piece.counts[name] for piece in pieces]) for name in first.counts},
        {name: concat_summaries([piece.summaries[name] for piece in pieces]) for name in first.summaries},
    )


def _row_keys(piece: StateRows, rows: Any, texts: Sequence[Sequence[str | None]]) -> list[GroupKey]:
    """The window of each of some rows, and its values by code."""
    columns = [
        [of[code] for code in cast("list[int]", codes[rows].tolist())]
        for of, codes in zip(texts, piece.codes, strict=True)
    ]
    values = list(zip(*columns, strict=True)) if columns else [()] * len(rows)
    return list(zip(cast("list[int]", piece.windows[rows].tolist()), values, strict=True))


def group_ids(columns: Iterable[Any], count: int) -> Any:
    """A number for each row, the same where all columns are the same, and ascending as they do."""
    ids, size = np.zeros(count, np.int64), 1
    for column in columns:
        low = int(column.min(initial=0))
        width = int(column.max(initial=0)) - low + 1
        if size * width >= 1 << 62:
            known, ids = np.unique(ids, return_inverse=True)
            column, size = np.unique(column, return_inverse=True)[1], len(known)
            low, width = 0, count
        ids = ids * width + (column - low)
        size *= width
    return ids


class DimensionValues:
    """The values of one dimension, with a code for each."""

    def __init__(self) -> None:
        self.codes: dict[str | None, int] = {}

    def coded(self, values: Sequence[str | None]) -> Any:
        codes = self.codes
        return np.array([codes.setdefault(value, len(codes)) for value in values], np.int64)

    def listed(self) -> list[str | None]:
        return list(self.codes)


class KeyedStates:
    """All states of one aggregate that are arrays, by window and by the values of some dimensions."""

    def __init__(self, texts: Sequence[DimensionValues]) -> None:
        self.texts = texts
        self.pieces: list[StateRows] = []
        self.rows = 0
        self.nbytes = 0
        self._unsettled_rows = 0
        self._unsettled_bytes = 0

    def fresh(self) -> KeyedStates:
        """The same without any state: for what is taken in as a whole, or not at all."""
        return KeyedStates(self.texts)

    def add(self, piece: StateRows) -> None:
        if not len(piece.windows):
            return
        self._put(piece)
        self._unsettled_rows += len(piece.windows)
        self._unsettled_bytes += piece.nbytes
        if self._unsettled_rows > UNSETTLED_ROWS_MAX or self._unsettled_bytes > UNSETTLED_BYTES_MAX:
            self.settle()

    def _put(self, piece: StateRows) -> None:
        self.pieces.append(piece)
        self.rows += len(piece.windows)
        self.nbytes += piece.nbytes

    def _replace(self, pieces: Iterable[StateRows]) -> None:
        self.pieces, self.rows, self.nbytes = [], 0, 0
        for piece in pieces:
            self._put(piece)

    def absorb(self, others: KeyedStates) -> None:
        for piece in others.pieces:
            self.add(piece)

    def settle(self) -> None:
        """Every group is in one row."""
        self._unsettled_rows = self._unsettled_bytes = 0
        if not self.pieces:
            return
        own = [piece.arrays() for piece in self.pieces if not piece.is_lent]
        pieces = [piece for piece in self.pieces if piece.is_lent]
        pieces += [concat_pieces(own)] if own else []
        columns = zip(*([piece.windows, *piece.codes] for piece in pieces), strict=True)
        found = _repeated_rows(group_ids([np.concatenate(column) for column in columns], self.rows))
        self._replace(pieces if found is None else _merge_pieces(pieces, *found))

    def take_out(self, keys: Collection[GroupKey]) -> list[tuple[list[GroupKey], StatePiece]]:
        """The states of some groups, as pieces with the key of each row; they are here no more."""
        windows = np.array(sorted({key[0] for key in keys}), np.int64)
        listed = [texts.listed() for texts in self.texts]
        found: list[tuple[list[GroupKey], StatePiece]] = []
        for place, piece in enumerate(self.pieces):
            rows = cast("list[int]", np.flatnonzero(np.isin(piece.windows, windows)).tolist())
            named = zip(rows, _row_keys(piece, rows, listed), strict=True)
            gone = {row: key for row, key in named if key in keys}
            if gone:
                found.append((list(gone.values()), piece.take(np.array(list(gone))).arrays()))
                self.pieces[place] = piece.take(np.delete(np.arange(len(piece.windows)), list(gone)))
        self._replace(self.pieces)
        return found

    def check(self, check_rows: Callable[[int], None], check_bytes: Callable[[int], None]) -> None:
        """Tells how large this is, if it may be too large; groups that came twice count once."""
        if self.rows > CHECKED_ROWS:
            self.settle()
            check_rows(self.rows)
        check_bytes(self.nbytes)


def _merge_pieces(pieces: Sequence[StateRows], rows: Any, group_of: Any, groups: int) -> list[StateRows]:
    """Pieces without the rows whose groups come again, and these merged. Rows are numbered through."""
    again = np.zeros(sum(len(piece.windows) for piece in pieces), bool)
    again[rows] = True
    kept: list[StateRows] = []
    taken: list[StatePiece] = []
    at = 0
    for piece in pieces:
        marks = again[at : at + len(piece.windows)]
        at += len(marks)
        if not marks.any():
            kept.append(piece)
            continue
        taken.append(piece.take(np.flatnonzero(marks)).arrays())
        if not marks.all():
            kept.append(piece.keep(~marks))
    return [*kept, concat_pieces(taken).merged(group_of[np.argsort(rows)], groups)]


def _repeated_rows(ids: Any) -> tuple[Any, Any, int] | None:
    """The rows whose id occurs more than once, the number of the id of each, and how many there are."""
    if (ids[1:] > ids[:-1]).all():
        return None
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    same = ordered[1:] == ordered[:-1]
    if not same.any():
        return None
    again = np.zeros(len(ids), bool)
    again[1:] |= same
    again[:-1] |= same
    first = again.copy()
    first[1:] &= ~same
    numbers = np.cumsum(first[again]) - 1
    return order[again], numbers, int(numbers[-1]) + 1
