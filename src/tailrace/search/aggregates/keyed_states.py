"""Aggregate states by window and group as arrays: merging, caching per file, and their JSON text.

States are collected in pieces. Most groups occur once; those that occur again are removed from their pieces,
merged, and become a piece of their own. A piece may refer to the cached states of a file, which are copied
only if they have to be merged.

A file never changes, and most requests are repeated. So the states of a rollup and interval in a row group
are cached with the file, within a byte limit, and so is the JSON text of each row once most of them were
needed. The JSON is the same as that of `measures.Summary.to_json`, but is encoded by column.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol, cast

import orjson

from tailrace.search.aggregates.exact_sums import compute_averages
from tailrace.search.aggregates.measures import EXACT_INTEGER_MAX, PERCENTILES, nearest_rank, round_sum
from tailrace.search.aggregates.summary_arrays import (
    BucketArray,
    SummaryArray,
    concat_summaries,
    values_at_ranks,
)
from tailrace.search.numpy_arrays import np, to_numpy
from tailrace.storage.segments.parquet import BINARY, pa, pc

_COMMA: Final = ord(",")
_END: Final = ord("}")
TextPiece = bytes | Any  # the same for all groups, or an Arrow array of one for each


def number_texts(numbers: Any) -> Any:
    """Each number as JSON, with a comma behind it."""
    if not len(numbers):
        return pa.array([], BINARY)
    text = bytearray(orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY))
    text[-1] = _COMMA
    return _split_texts(text, np.flatnonzero(np.frombuffer(text, np.uint8) == _COMMA) + 1, 1)


def _split_texts(text: bytes | bytearray, ends: Any, begin: int) -> Any:
    """A text cut into pieces, of which the first begins at `begin`."""
    offsets = np.empty(len(ends) + 1, np.int32)
    offsets[0] = begin
    offsets[1:] = ends
    return pa.Array.from_buffers(BINARY, len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def join_texts(pieces: Sequence[TextPiece]) -> Any:
    """The pieces of each group as one text."""
    scalars = [pa.scalar(piece, BINARY) if isinstance(piece, bytes) else piece for piece in pieces]
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", BINARY))


def measure_texts(counts: Mapping[str, Any], summaries: Mapping[str, SummaryArray], rows: int) -> Any:
    """All measures of each group as one object, in the order of their names."""
    parts: list[TextPiece] = [b"{"]
    for index, name in enumerate(sorted([*counts, *summaries])):
        parts.append(b"%b%b:" % (b"," if index else b"", orjson.dumps(name)))
        parts += count_pieces(counts[name]) if name in counts else summary_pieces(summaries[name])
    parts.append(b"}")
    return join_texts(_merge_constants(parts)) if len(parts) > 2 else pa.array([b"{}"] * rows, BINARY)


def _merge_constants(parts: Sequence[TextPiece]) -> list[TextPiece]:
    """The same with constant pieces that follow each other as one."""
    found: list[TextPiece] = []
    for part in parts:
        if isinstance(part, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += part
        else:
            found.append(part)
    return found


def count_pieces(counts: Any) -> list[TextPiece]:
    return [b'{"count":', _without_comma(number_texts(counts)), b"}"]


def _without_comma(texts: Any) -> Any:
    return pc.binary_slice(texts, 0, -1)


def summary_pieces(found: SummaryArray) -> list[TextPiece]:
    """A summary without numbers has neither edges nor percentiles."""
    is_empty = found.counts == 0
    counts = np.maximum(found.counts, 1)
    least, most = (np.where(is_empty, 0, edge) for edge in (found.smallest, found.largest))
    smallest, largest = (_or_null(number_texts(edge), is_empty) for edge in (least, most))
    pieces: list[TextPiece] = [b'{"count":', number_texts(found.counts), b'"sum":', _sum_texts(found)]
    pieces += [b'"min":', smallest, b'"max":', largest]
    pieces += [b'"avg":', _or_null(number_texts(compute_averages(found.sums, counts)), is_empty)]
    for name, share in PERCENTILES:
        values = values_at_ranks(found.sketch, _ranks(share, counts))
        texts = pc.if_else(_less(values, least), smallest, number_texts(values))
        texts = pc.if_else(_less(most, values), largest, texts)
        pieces += [b'"%b":' % name.encode(), _or_null(texts, is_empty)]
    if found.histogram is None:
        pieces[-1] = _without_comma(pieces[-1])
        return [*pieces, b"}"]
    return [*pieces, b'"histogram":', _histogram_texts(found.histogram), b"}"]


def _less(one: Any, other: Any) -> Any:
    """Compares doubles and integers as what they are: not all integers are doubles."""
    if all(_are_doubles(numbers) for numbers in (one, other)):
        return one < other
    return (one.astype(object) < other.astype(object)).astype(bool)


def _are_doubles(numbers: Any) -> bool:
    return numbers.dtype != np.int64 or bool(
        ((numbers > -EXACT_INTEGER_MAX) & (numbers < EXACT_INTEGER_MAX)).all()
    )


def _or_null(texts: Any, is_null: Any) -> Any:
    return pc.if_else(is_null, pa.scalar(b"null,", BINARY), texts) if is_null.any() else texts


def _ranks(share: float, counts: Any) -> Any:
    percent = round(share * 100)
    if int(counts.max(initial=0)) < 1 << 50:
        return np.maximum(1, -(-percent * counts // 100))
    return np.array([nearest_rank(share, count) for count in counts.tolist()])


def _sum_texts(found: SummaryArray) -> Any:
    """The nearest doubles; integers as they are, as long as doubles have them all."""
    sums = found.sums
    is_whole = (np.abs(sums.nearest) <= EXACT_INTEGER_MAX) & (sums.rests == 0)
    texts = number_texts(sums.nearest)
    if found.whole:
        wholes = np.where(is_whole, sums.nearest, 0).astype(np.int64)
        texts = pc.if_else(is_whole, number_texts(wholes), texts)
    if sums.beyond:
        listed = texts.to_pylist()
        for row, total in sums.beyond.items():
            listed[row] = orjson.dumps(round_sum(total, found.whole)) + b","
        texts = pa.array(listed, BINARY)
    return texts


def _histogram_texts(histogram: BucketArray) -> Any:
    """`{"1":2,"4":1}`: the comma behind the last count of a row becomes the end of it."""
    starts = histogram.starts
    sizes = np.diff(starts)
    if not len(histogram.codes):
        return pa.array([b"{}"] * len(sizes), BINARY)
    labels = [b'"%d":' % (1 << exponent) for exponent in range(int(histogram.codes.max()) + 1)]
    both = pa.array([*labels, *(b"{" + label for label in labels)], BINARY)
    is_first = np.zeros(len(histogram.codes), bool)
    is_first[starts[:-1][sizes > 0]] = True
    entries = join_texts(
        [both.take(pa.array(histogram.codes + is_first * len(labels))), number_texts(histogram.counts)]
    )
    offsets = np.frombuffer(entries.buffers()[1], np.int32, len(entries) + 1)
    text = bytearray(entries.buffers()[2])
    np.frombuffer(text, np.uint8)[offsets[starts[1:][sizes > 0]] - 1] = _END
    found = _split_texts(text, offsets[starts[1:]], int(offsets[0]))
    return found if sizes.all() else pc.if_else(sizes == 0, pa.scalar(b"{}", BINARY), found)


UNSETTLED_ROWS_MAX: Final = 200_000
CHECKED_ROWS: Final = 100_000
UNSETTLED_BYTES_MAX: Final = 32 << 20

GroupKey = tuple[int, tuple[str | None, ...]]  # the start of the window, and the values of `group_by`


class StateRows(Protocol):
    """States of groups, one row for each."""

    @property
    def windows(self) -> Any: ...
    @property
    def codes(self) -> list[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_shared(self) -> bool:
        """Whether it is most of the cached states of a file, and should not be copied."""
        ...

    def take(self, rows: Any) -> StateRows: ...
    def filter(self, marks: Any) -> StateRows: ...
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
    def is_shared(self) -> bool:
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

    def filter(self, marks: Any) -> StatePiece:
        """The marked rows."""
        return StatePiece(
            self.windows[marks],
            [codes[marks] for codes in self.codes],
            {name: counts[marks] for name, counts in self.counts.items()},
            {name: found.filter(marks) for name, found in self.summaries.items()},
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

    def empty_copy(self) -> KeyedStates:
        """The same without any state: for what is taken in as a whole, or not at all."""
        return KeyedStates(self.texts)

    def add(self, piece: StateRows) -> None:
        if not len(piece.windows):
            return
        self._put(piece)
        self._unsettled_rows += len(piece.windows)
        self._unsettled_bytes += piece.nbytes
        if self._unsettled_rows > UNSETTLED_ROWS_MAX or self._unsettled_bytes > UNSETTLED_BYTES_MAX:
            self.combine_groups()

    def _put(self, piece: StateRows) -> None:
        self.pieces.append(piece)
        self.rows += len(piece.windows)
        self.nbytes += piece.nbytes

    def _replace(self, pieces: Iterable[StateRows]) -> None:
        self.pieces, self.rows, self.nbytes = [], 0, 0
        for piece in pieces:
            self._put(piece)

    def merge(self, others: KeyedStates) -> None:
        for piece in others.pieces:
            self.add(piece)

    def combine_groups(self) -> None:
        """Every group is in one row."""
        self._unsettled_rows = self._unsettled_bytes = 0
        if not self.pieces:
            return
        own = [piece.arrays() for piece in self.pieces if not piece.is_shared]
        pieces = [piece for piece in self.pieces if piece.is_shared]
        pieces += [concat_pieces(own)] if own else []
        columns = zip(*([piece.windows, *piece.codes] for piece in pieces), strict=True)
        found = _repeated_rows(group_ids([np.concatenate(column) for column in columns], self.rows))
        self._replace(pieces if found is None else _merge_pieces(pieces, *found))

    def pop_groups(self, keys: Collection[GroupKey]) -> list[tuple[list[GroupKey], StatePiece]]:
        """Remove the states of some groups. Returns them as pieces with the key of each row."""
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
        """Check the size if it may be too large; groups that occur twice count once."""
        if self.rows > CHECKED_ROWS:
            self.combine_groups()
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
            kept.append(piece.filter(~marks))
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


_OVERHEAD_BYTES: Final = 2000  # of the objects around the arrays
_WORD_BYTES: Final = 100  # of one value of a dimension


class StoredStates:
    """One row for each group. The arrays are immutable: requests share them."""

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
    def is_shared(self) -> bool:
        return 2 * len(self.windows) >= len(self.states.windows)

    def take(self, rows: Any) -> StoredPiece:
        places = rows if self.rows is None else self.rows[rows]
        return StoredPiece(self.states, places, self.windows[rows], [codes[rows] for codes in self.codes])

    def filter(self, marks: Any) -> StateRows:
        return self.take(np.flatnonzero(marks))

    def arrays(self) -> StatePiece:
        return self.states.arrays(self.rows, self.codes)

    def texts(self) -> Any:
        return self.states.texts(self.rows)


class StateCache:
    """LRU cache of the states of one file, bounded in bytes; used by several threads."""

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
        """Cache states, unless they leave no room for others. Returns whether they were cached."""
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
