"""Columns of chunks: one field over many rows, as packed arrays, a term dictionary and inverted lists.

A set of rows is one integer with a bit for each row: and, or and not of a whole chunk are single operations.
Terms are the sorted distinct values, and `ranks` holds the values of all rows in order as term numbers. The
terms of a text are its tokens; a separator stands between two values, so that `ranks` holds positions too.
Inverted lists (rows by term) are built from `ranks` and may be dropped; then `ranks` is searched.

Most columns have one scalar in each row. These are built from their distinct values: each is converted,
tokenised and numbered once, however many rows have it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, compress, repeat
from math import isfinite
from typing import Any, Final, NamedTuple, Protocol, cast

from tailrace.schema.search_config import Field
from tailrace.search.records import (
    INT64_MAX,
    Value,
    converter_for,
    flatten_leaves,
    parse_dates,
    tokenize_text,
)

_DICTIONARY_OVERHEAD_BYTES = 64  # of an array object
_SPARSE = 8  # sets with less than one row in this many are searched bit by bit
_DIGITS = bytes.maketrans(b"01", b"\0\1")


def pack_numbers(numbers: Sequence[int], largest: int) -> array[int]:
    """Unsigned numbers in the narrowest array type."""
    return array("B" if largest < 1 << 8 else "H" if largest < 1 << 16 else "I", numbers)


def array_bytes(numbers: array[int] | array[float] | None) -> int:
    return 0 if numbers is None else len(numbers) * numbers.itemsize + _DICTIONARY_OVERHEAD_BYTES


def bits_from_rows(rows: Iterable[int], count: int) -> int:
    """The set of rows out of `count` rows."""
    marks = bytearray(count // 8 + 1)
    for row in rows:
        marks[row >> 3] |= 1 << (row & 7)
    return int.from_bytes(marks, "little")


def bits_in_code_range(codes: bytes, first: int, end: int) -> int:
    """The set of rows whose code, one byte for each row, is at least `first` and below `end`."""
    digits = b"0" * first + b"1" * (end - first) + b"0" * (256 - end)
    return int(codes.translate(digits)[::-1], 2) if codes else 0


def bits_from_flags(flags: Iterable[bool]) -> int:
    """The set of rows whose flag is set."""
    return bits_in_code_range(bytes(flags), 1, 2)


def rows_from_bits(bits: int) -> list[int]:
    """The rows of a set, ascending."""
    length = bits.bit_length()
    if bits.bit_count() * _SPARSE > length:
        return list(compress(range(length), format(bits, "b")[::-1].encode().translate(_DIGITS)))
    rows: list[int] = []
    text = format(bits, "b")[::-1]
    at = text.find("1")
    while at >= 0:
        rows.append(at)
        at = text.find("1", at + 1)
    return rows


class TermDictionary(Protocol):
    """The distinct values of one field in one chunk, ascending; the position of a term is its rank."""

    memory_bytes: int

    def __len__(self) -> int: ...
    def __getitem__(self, rank: int) -> Value: ...
    def all(self) -> Sequence[Value]:
        """All terms by rank."""
        ...

    def find(self, value: Value) -> int:
        """The rank of a value, or -1."""
        ...

    def range_of(self, comparison: str, bound: Value) -> range:
        """The ranks for which the comparison with a bound holds."""
        ...


class NumberDictionary:
    """Integers, dates, booleans and floats."""

    def __init__(self, values: Sequence[int | float], is_float: bool) -> None:
        self._values: array[int] | array[float] = array("d" if is_float else "q", values)
        self.memory_bytes = array_bytes(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rank: int) -> Value:
        return self._values[rank]

    def all(self) -> Sequence[Value]:
        return self._values

    def find(self, value: Value) -> int:
        assert not isinstance(value, str)
        rank = bisect_left(self._values, value)
        return rank if rank < len(self._values) and self._values[rank] == value else -1

    def range_of(self, comparison: str, bound: Value) -> range:
        assert not isinstance(bound, str)
        values, count = self._values, len(self._values)
        if comparison == ">":
            return range(bisect_right(values, bound), count)
        if comparison == ">=":
            return range(bisect_left(values, bound), count)
        if comparison == "<":
            return range(bisect_left(values, bound))
        if comparison == "<=":
            return range(bisect_right(values, bound))
        return range(bisect_left(values, bound), bisect_right(values, bound))


class StringDictionary:
    """Strings as concatenated UTF-8 with their ends: bytes sort as code points do."""

    def __init__(self, words: Sequence[str]) -> None:
        text = "".join(words)
        self._text = text.encode()
        lengths = map(len, words) if text.isascii() else [len(word.encode()) for word in words]
        self._ends = pack_numbers(list(accumulate(lengths)), len(self._text))
        self.memory_bytes = len(self._text) + array_bytes(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def raw(self, rank: int) -> bytes:
        return self._text[self._ends[rank - 1] if rank else 0 : self._ends[rank]]

    def __getitem__(self, rank: int) -> str:
        return self.raw(rank).decode()

    def all(self) -> Sequence[Value]:
        text, begin, words = self._text, 0, list[str]()
        for end in self._ends:
            words.append(text[begin:end].decode())
            begin = end
        return words

    def find(self, value: Value) -> int:
        encoded = str(value).encode()
        rank = bisect_left(range(len(self._ends)), encoded, key=self.raw)
        return rank if rank < len(self._ends) and self.raw(rank) == encoded else -1

    def starting_with(self, prefix: str) -> range:
        encoded = prefix.encode()
        ranks, length = range(len(self._ends)), len(encoded)
        first = bisect_left(ranks, encoded, key=self.raw)
        return range(first, bisect_right(ranks, encoded, first, key=lambda rank: self.raw(rank)[:length]))

    def range_of(self, comparison: str, bound: Value) -> range:
        """Strings are only compared to sort hits, by `>=` and `<=`."""
        encoded, ranks = str(bound).encode(), range(len(self._ends))
        if comparison == ">=":
            return range(bisect_left(ranks, encoded, key=self.raw), len(ranks))
        assert comparison == "<="
        return range(bisect_right(ranks, encoded, key=self.raw))


_DENSE = 16  # a term in more than one row of this many has a set of rows instead of a list
_SET_BYTES = 120  # overhead of such a set
_LENGTHS_MAX = 64  # distinct text lengths in a chunk up to which each has a set of rows


class InvertedLists(NamedTuple):
    """The rows of each term: concatenated lists and their ends, or sets for terms in many rows."""

    rows: array[int]
    ends: array[int]
    dense: dict[int, int]
    lengths: dict[int, int] | None  # texts: rows by length, if there are few lengths
    repeats: dict[int, array[int]]  # texts: rows that have a token more than once

    def memory_bytes(self, count: int) -> int:
        sets = len(self.dense) + len(self.lengths or ())
        lists = array_bytes(self.rows) + array_bytes(self.ends) + sum(map(array_bytes, self.repeats.values()))
        return lists + sets * (_SET_BYTES + count // 8) + len(self.repeats) * _SET_BYTES


def invert_unique(order: Sequence[int]) -> InvertedLists:
    """Invert a column in which each row has one value and each value one row; `order` is rows by rank."""
    count = len(order)
    return InvertedLists(pack_numbers(order, count), pack_numbers(range(1, count + 1), count), {}, None, {})


def invert_single(ranks: Sequence[int], terms: int) -> InvertedLists:
    """Invert a column with exactly one value in each row."""
    count = len(ranks)
    found = Counter(ranks)
    sizes = [found[rank] for rank in range(terms)]
    # Stable: the rows of one term stay in order.
    rows = sorted(range(count), key=ranks.__getitem__)
    dense: dict[int, int] = {}
    often = [rank for rank, size in enumerate(sizes) if _is_dense(size, count)]
    if often:
        ends = list(accumulate(sizes))
        codes = bytes(ranks) if terms <= 256 else None
        sparse: list[int] = []
        at = 0
        for rank in often:
            begin, end = ends[rank] - sizes[rank], ends[rank]
            dense[rank] = (
                bits_from_rows(rows[begin:end], count)
                if codes is None
                else bits_in_code_range(codes, rank, rank + 1)
            )
            sparse += rows[at:begin]
            at = end
            sizes[rank] = 0
        rows = sparse + rows[at:]
    ends = list(accumulate(sizes))
    return InvertedLists(pack_numbers(rows, count), pack_numbers(ends, len(rows)), dense, None, {})


def invert(
    ranks: Sequence[int], starts: Sequence[int], terms: int, lengths: Sequence[int] | None
) -> InvertedLists:
    """Invert a column with any number of values in a row; `lengths` of texts are in tokens."""
    count = len(starts) - 1
    owners = list(chain.from_iterable(repeat(row, starts[row + 1] - starts[row]) for row in range(count)))
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    found = Counter(ranks)
    rows: list[int] = []
    ends: list[int] = []
    dense: dict[int, int] = {}
    repeats: dict[int, array[int]] = {}
    at = 0
    for rank in range(terms):
        own = [owners[place] for place in order[at : at + found[rank]]]
        at += len(own)
        once = list(dict.fromkeys(own))
        if len(once) < len(own) and lengths is not None:
            repeats[rank] = pack_numbers([row for row, often in Counter(own).items() if often > 1], count)
        if _is_dense(len(once), count):
            dense[rank] = bits_from_rows(once, count)
        else:
            rows += once
        ends.append(len(rows))
    by_length = None if lengths is None else _by_length(lengths)
    return InvertedLists(pack_numbers(rows, count), pack_numbers(ends, len(rows)), dense, by_length, repeats)


def _is_dense(size: int, count: int) -> bool:
    return size * _DENSE > count >= _DENSE


def _by_length(lengths: Sequence[int]) -> dict[int, int] | None:
    distinct = set(lengths)
    if len(distinct) > _LENGTHS_MAX:
        return None
    if max(distinct, default=0) < 256:
        codes = bytes(lengths)
        return {length: bits_in_code_range(codes, length, length + 1) for length in sorted(distinct)}
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(length, []).append(row)
    return {length: bits_from_rows(rows, len(lengths)) for length, rows in by_length.items()}


def rows_at_positions(starts: Sequence[int], positions: Iterable[int]) -> Iterable[int]:
    """The rows of ascending positions in a column."""
    row = 0
    for position in positions:
        while starts[row + 1] <= position:
            row += 1
        yield row


_COLUMN_OVERHEAD_BYTES = 500  # objects of a column
_PHRASES_CACHED_MAX = 8


class PhraseOccurrences(NamedTuple):
    """The rows that have a phrase, and the counts of those that have it more than once."""

    rows: int
    more: dict[int, int]


NO_OCCURRENCES = PhraseOccurrences(0, {})


class Column:
    """Built by `build_column`. Without `starts` every row has exactly one value.

    `order`, the rows by rank, is passed if every term also has exactly one row.
    """

    def __init__(
        self,
        field: Field,
        terms: list[Any],
        ranks: list[int],
        starts: list[int] | None,
        multiple: int,
        present: int,
        *,
        lists: bool = True,
        order: list[int] | None = None,
    ) -> None:
        self.count = len(ranks) if starts is None else len(starts) - 1
        self.terms: TermDictionary = (
            StringDictionary(terms)
            if field.kind in ("keyword", "text")
            else NumberDictionary(terms, field.kind == "float")
        )
        self.break_rank = len(terms)
        self.ranks = pack_numbers(ranks, len(terms))
        self.starts = None if starts is None else pack_numbers(starts, len(ranks))
        self.multiple = multiple  # rows with more than one value
        self.present = present  # rows with a value
        self._phrase: tuple[tuple[str, ...], PhraseOccurrences] | None = None
        self.tokens = self.documents = 0
        lengths: list[int] | None = None
        if field.kind == "text":
            lengths = self._lengths()
            self.tokens = sum(lengths)
            self.documents = self.count - lengths.count(0)  # rows with a token
        self._lists: InvertedLists | None = None
        # A column without lists serves one search, which needs the same rows more than once.
        self._cached_rows: dict[range, int] | None = None if lists else {}
        if lists:
            plain = starts is None and lengths is None
            self._lists = (
                invert_unique(order)
                if order is not None
                else invert_single(ranks, len(terms))
                if plain
                else invert(
                    ranks,
                    range(self.count + 1) if starts is None else starts,
                    len(terms),
                    lengths if self.tokens else None,
                )
            )
        self.memory_bytes = self._total_bytes()

    def _lengths(self) -> list[int]:
        if self.starts is None:
            return [1] * self.count
        if self.multiple:
            return [self.length_of(row) for row in range(self.count)]
        starts = self.starts
        return [starts[row + 1] - starts[row] for row in range(self.count)]

    def _total_bytes(self) -> int:
        bits = (self.multiple.bit_length() + self.present.bit_length()) // 8
        lists = 0 if self._lists is None else self._lists.memory_bytes(self.count)
        columns = self.terms.memory_bytes + array_bytes(self.ranks) + array_bytes(self.starts)
        return columns + lists + bits + _COLUMN_OVERHEAD_BYTES

    @property
    def inverted(self) -> bool:
        return self._lists is not None

    def drop_lists(self) -> None:
        """Free the inverted lists. One assignment: other threads may be reading the column."""
        self._lists = None
        self.memory_bytes = self._total_bytes()

    # -- lookups -----------------------------------------------------------------------------------------

    def with_ranks(self, ranks: range) -> int:
        """The rows with a term in a range of ranks."""
        if not ranks:
            return 0
        lists = self._lists
        if lists is not None:
            begin = lists.ends[ranks.start - 1] if ranks.start else 0
            end = lists.ends[ranks.stop - 1]
            found = bits_from_rows(lists.rows[begin:end], self.count) if begin < end else 0
            for rank, bits in lists.dense.items():
                if rank in ranks:
                    found |= bits
            return found
        found = self._cached_rows.get(ranks) if self._cached_rows else None
        if found is None:
            found = self._search(ranks)
            if self._cached_rows is not None and len(self._cached_rows) < _PHRASES_CACHED_MAX:
                self._cached_rows[ranks] = found
        return found

    def _search(self, ranks: range) -> int:
        low, high = ranks.start, ranks.stop
        if not low and high == len(self.terms) and not self.tokens:
            return self.present  # in a text, a row may have a value and no token
        if self.starts is None and self.ranks.typecode == "B":
            return bits_in_code_range(self.ranks.tobytes(), low, high)
        places = [at for at, rank in enumerate(self.ranks) if low <= rank < high]
        return bits_from_rows(
            places if self.starts is None else rows_at_positions(self.starts, places), self.count
        )

    def by_length(self, rows: int) -> dict[int, int] | None:
        """Rows by the length of their text; None if lengths are not indexed."""
        lists = self._lists
        if lists is None or lists.lengths is None:
            return None
        return {length: found for length, bits in lists.lengths.items() if (found := bits & rows)}

    def repeating(self, rank: int) -> int:
        """Rows that have a token more than once; only if `by_length` is not None."""
        lists = self._lists
        return self.present if lists is None else bits_from_rows(lists.repeats.get(rank, ()), self.count)

    def phrase(self, tokens: Sequence[str]) -> PhraseOccurrences:
        """The rows with tokens in sequence. The last result is cached: a search needs it more than once."""
        key, cached = tuple(tokens), self._phrase
        if cached is None or cached[0] != key:
            ranks = [self.terms.find(token) for token in key]
            cached = self._phrase = key, NO_OCCURRENCES if -1 in ranks else self._occurrences(ranks)
        return cached[1]

    def _occurrences(self, ranks: Sequence[int]) -> PhraseOccurrences:
        width = self.ranks.itemsize
        text, wanted = self.ranks.tobytes(), array(self.ranks.typecode, ranks).tobytes()
        starts, length = self.starts, len(ranks)
        found: dict[int, int] = {}
        at = text.find(wanted)
        while at >= 0:
            place, inside = divmod(at, width)
            if not inside:
                row = place if starts is None else bisect_right(starts, place) - 1
                end = place + 1 if starts is None else starts[row + 1]
                if place + length <= end:  # else it continues in the next row
                    found[row] = found.get(row, 0) + 1
            at = text.find(wanted, at + 1)
        more = {row: count for row, count in found.items() if count > 1}
        return PhraseOccurrences(bits_from_rows(found, self.count), more)

    def documents_with(self, rank: int) -> int:
        """How many rows have a term."""
        lists = self._lists
        if lists is not None and rank not in lists.dense:
            return lists.ends[rank] - (lists.ends[rank - 1] if rank else 0)
        return self.with_ranks(range(rank, rank + 1)).bit_count()

    def ranks_of(self, row: int) -> array[int]:
        if self.starts is None:
            return self.ranks[row : row + 1]
        return self.ranks[self.starts[row] : self.starts[row + 1]]

    def length_of(self, row: int) -> int:
        """The length of a text in tokens."""
        if self.starts is None:
            return 1
        length = self.starts[row + 1] - self.starts[row]
        if self.multiple and self.multiple >> row & 1:
            length -= self.ranks_of(row).count(self.break_rank)
        return length

    def values_of(self, row: int) -> list[array[int]]:
        """The texts of a row, each as the ranks of its tokens."""
        ranks = self.ranks_of(row)
        if not self.multiple or not self.multiple >> row & 1:
            return [ranks]
        values: list[array[int]] = [array(ranks.typecode)]
        for rank in ranks:
            if rank == self.break_rank:
                values.append(array(ranks.typecode))
            else:
                values[-1].append(rank)
        return values

    def extreme_value(self, row: int, largest: bool) -> Value | None:
        """The smallest or largest value of a row."""
        ranks = self.ranks_of(row)
        if not ranks:
            return None
        return self.terms[ranks[0] if len(ranks) == 1 else max(ranks) if largest else min(ranks)]


_VALUE_SEPARATOR: Final = ""  # never a token
_NUMBER_TYPES: Final = frozenset({int, float})
_SCALAR_TYPES: Final = frozenset({str, int, float, bool, type(None)})


def build_column(field: Field, found: list[object], *, lists: bool = True) -> Column:
    """The column of a field from the raw value at its pointer in each row; None if there is none."""
    kinds = set(map(type, found))
    if not kinds <= _SCALAR_TYPES or (bool in kinds and kinds & _NUMBER_TYPES):
        # Arrays and objects; and booleans beside numbers, because True equals 1.
        return build_column_from_values(field, _all_values(field, found), lists=lists)
    canonical = _canonical(field, set(found))
    if field.kind == "text":
        return _text_column(field, found, cast("Mapping[object, str | None]", canonical), lists)
    if len(canonical) == len(found):
        values = list(map(canonical.__getitem__, found))
        if None not in values and len(set(values)) == len(values):
            return _unique_column(field, cast("list[Any]", values), lists)
    terms = sorted(cast("set[Any]", set(canonical.values()) - {None}))
    numbers = {term: rank for rank, term in enumerate(terms)}
    ranks = {leaf: numbers[value] for leaf, value in canonical.items() if value is not None}
    if len(ranks) == len(canonical):
        everywhere = (1 << len(found)) - 1
        return Column(field, terms, list(map(ranks.__getitem__, found)), None, 0, everywhere, lists=lists)
    listed = [ranks[leaf] for leaf in found if leaf in ranks]
    flags = [leaf in ranks for leaf in found]
    starts = list(accumulate(flags, initial=0))
    return Column(field, terms, listed, starts, 0, bits_from_flags(flags), lists=lists)


def _unique_column(field: Field, values: list[Any], lists: bool) -> Column:
    """The column of a field such as an id: each row has one value, which no other row has."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(order)
    for rank, row in enumerate(order):
        ranks[row] = rank
    terms = list(map(values.__getitem__, order))
    everywhere = (1 << len(order)) - 1
    return Column(field, terms, ranks, None, 0, everywhere, lists=lists, order=order)


def _canonical(field: Field, distinct: set[object]) -> Mapping[object, Value | None]:
    """The canonical value of each raw value; None if it has none."""
    if field.kind == "date":
        return parse_dates(distinct)
    if _are_canonical(field, distinct):
        return cast("dict[object, Value]", dict(zip(distinct, distinct, strict=True)))
    convert = converter_for(field)
    return {leaf: convert(leaf) for leaf in distinct}


def _are_canonical(field: Field, distinct: set[object]) -> bool:
    """Whether all raw values are canonical already, checked for the common types at once."""
    kinds = set(map(type, distinct))
    if kinds == {str}:
        plain = field.kind in ("keyword", "text") and field.normalizer != "lowercase_v1"
        return plain and "".join(cast("set[str]", distinct)).isascii()
    if kinds == {int} and field.kind == "integer":
        numbers = cast("set[int]", distinct)
        return min(numbers) >= -INT64_MAX and max(numbers) <= INT64_MAX
    if kinds == {float} and field.kind == "float":
        return 0.0 not in distinct and all(map(isfinite, cast("set[float]", distinct)))
    return False


def _text_column(
    field: Field, found: list[object], canonical: Mapping[object, str | None], lists: bool
) -> Column:
    tokens = {leaf: [] if text is None else tokenize_text(text) for leaf, text in canonical.items()}
    terms = sorted(set(chain.from_iterable(tokens.values())))
    number = {term: rank for rank, term in enumerate(terms)}.__getitem__
    ranked = {leaf: list(map(number, listed)) for leaf, listed in tokens.items()}
    ranks = list(chain.from_iterable(map(ranked.__getitem__, found)))
    lengths = {leaf: len(listed) for leaf, listed in ranked.items()}
    starts = list(accumulate(map(lengths.__getitem__, found), initial=0))
    present = bits_from_flags([canonical[leaf] is not None for leaf in found])
    single = set(lengths.values()) == {1}
    return Column(field, terms, ranks, None if single else starts, 0, present, lists=lists)


def _all_values(field: Field, found: Iterable[object]) -> list[list[Value]]:
    convert = converter_for(field)
    return [
        [value for leaf in flatten_leaves(item) if (value := convert(leaf)) is not None] for item in found
    ]


def build_column_from_values(
    field: Field, values: Sequence[Sequence[Value]], *, lists: bool = True
) -> Column:
    """The column of a field from its values in each row."""
    is_text = field.kind == "text"
    listed: Sequence[Sequence[Any]] = _tokens(values) if is_text else values
    distinct: set[Any] = set()
    for row in listed:
        distinct.update(row)
    if is_text:
        distinct.discard(_VALUE_SEPARATOR)
    terms = sorted(distinct)
    numbers: dict[Value, int] = {term: rank for rank, term in enumerate(terms)}
    if is_text:
        numbers[_VALUE_SEPARATOR] = len(terms)
    ranks: list[int] = []
    starts: list[int] = [0]
    for row in listed:
        ranks += [numbers[value] for value in row]
        starts.append(len(ranks))
    multiple = bits_from_rows((row for row, found in enumerate(values) if len(found) > 1), len(values))
    present = bits_from_rows((row for row, found in enumerate(values) if found), len(values))
    return Column(field, terms, ranks, _starts(ranks, starts, len(terms)), multiple, present, lists=lists)


def _starts(ranks: list[int], starts: list[int], break_rank: int) -> list[int] | None:
    """None if every row has exactly one rank. Two texts without tokens have only a separator."""
    single = len(ranks) == len(starts) - 1 and starts == list(range(len(starts)))
    return None if single and break_rank not in ranks else starts


def join_columns(field: Field, columns: Sequence[Column]) -> Column:
    """Concatenate columns."""
    listed = [column.terms.all() for column in columns]
    terms: list[Any] = sorted({term for terms in listed for term in terms})
    numbers = {term: rank for rank, term in enumerate(terms)}
    ranks: list[int] = []
    starts: list[int] = [0]
    multiple = present = count = 0
    for column, own in zip(columns, listed, strict=True):
        renumbered = [numbers[term] for term in own] + [len(terms)]
        base = len(ranks)
        ranks += [renumbered[rank] for rank in column.ranks]
        ends = range(1, column.count + 1) if column.starts is None else column.starts[1:]
        starts += [base + end for end in ends]
        multiple |= column.multiple << count
        present |= column.present << count
        count += column.count
    return Column(field, terms, ranks, _starts(ranks, starts, len(terms)), multiple, present)


def _tokens(values: Sequence[Sequence[Value]]) -> list[list[str]]:
    rows: list[list[str]] = []
    for row in values:
        tokens: list[str] = []
        for index, value in enumerate(row):
            if index:
                tokens.append(_VALUE_SEPARATOR)
            tokens += tokenize_text(str(value))
        rows.append(tokens)
    return rows
