"""Columns from what records hold at a pointer, from values, and from other columns.

Most columns hold one plain leaf in each row. Those are made by their distinct leaves: each is converted, cut
into tokens and numbered once, however many rows have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from math import isfinite
from typing import Any, Final, cast

from tailrace.schema.search_fields import Field
from tailrace.search.analyze import tokenize_text
from tailrace.search.column import Column
from tailrace.search.packed import bits_from_flags, bits_from_rows
from tailrace.search.values import INT64_MAX, Value, converter_for, flatten_leaves, parse_dates

_VALUE_SEPARATOR: Final = ""  # is no token
_NUMBER_TYPES: Final = frozenset({int, float})
_SCALAR_TYPES: Final = frozenset({str, int, float, bool, type(None)})


def build_column(field: Field, found: list[object], *, lists: bool = True) -> Column:
    """The column of a field, given what lies at its pointer in each row: None where nothing is."""
    kinds = set(map(type, found))
    if not kinds <= _SCALAR_TYPES or (bool in kinds and kinds & _NUMBER_TYPES):
        # Arrays and objects; and truths beside numbers, which would be equal to some of them.
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
    """Of ids, times and the like: each row has one value, and no other row has it."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(order)
    for rank, row in enumerate(order):
        ranks[row] = rank
    terms = list(map(values.__getitem__, order))
    everywhere = (1 << len(order)) - 1
    return Column(field, terms, ranks, None, 0, everywhere, lists=lists, order=order)


def _canonical(field: Field, distinct: set[object]) -> Mapping[object, Value | None]:
    """Each leaf's value, or None if it has none."""
    if field.kind == "date":
        return parse_dates(distinct)
    if _are_canonical(field, distinct):
        return cast("dict[object, Value]", dict(zip(distinct, distinct, strict=True)))
    convert = converter_for(field)
    return {leaf: convert(leaf) for leaf in distinct}


def _are_canonical(field: Field, distinct: set[object]) -> bool:
    """Whether every leaf is its own value. What is usual is told of all of them at once."""
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
    """The column of a field, given its values in each row."""
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
    """None if every row has exactly one. Two values without tokens are but the break between them."""
    single = len(ranks) == len(starts) - 1 and starts == list(range(len(starts)))
    return None if single and break_rank not in ranks else starts


def join_columns(field: Field, columns: Sequence[Column]) -> Column:
    """One column of several, one behind the other."""
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
