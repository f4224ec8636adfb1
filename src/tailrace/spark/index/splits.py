"""Several text splits become one: the same postings in one table, a piece of it at a time."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from tailrace.search.index_files.format import (
    ENTRIES,
    FIELD,
    FREQUENCIES,
    FTS,
    POSITIONS,
    SPLIT_FACTS,
    SPLIT_TERMS,
    TERM,
)
from tailrace.spark.index.arrays import expand_spans, np, offsets_from_counts, stable_argsort, to_numpy
from tailrace.spark.index.fts import SplitFacts, zip_split
from tailrace.spark.index.parquet import BuiltIndexFile, IndexedRange, build_file_facts
from tailrace.spark.index.postings import (
    GROUP_ROWS,
    TERMS_SCHEMA,
    Postings,
    all_entries_table,
    build_terms_table,
    write_terms,
)
from tailrace.spark.index.row_groups import cut_row_groups
from tailrace.storage.segments.parquet import pa, pc, pq

MERGE_POSTINGS: Final = 1 << 18  # that are put in order at once


class _TermsFile:
    """The table of terms of one split. Each of its row groups has rows of one field."""

    def __init__(self, terms: bytes) -> None:
        self._file: Any = pq.ParquetFile(pa.BufferReader(terms))
        metadata, names = self._file.metadata, self._file.schema_arrow.names
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        self._fields: list[str] = [group.column(names.index(FIELD)).statistics.min for group in groups]

    def rows_of(self, field: str) -> Any:
        places = [place for place, name in enumerate(self._fields) if name == field]
        return self._file.read_row_groups(places, use_threads=False).cast(TERMS_SCHEMA)


def merge_splits(splits: Sequence[bytes], covers: IndexedRange) -> BuiltIndexFile:
    """Splits of one plan, in the order of their entries. One field at a time is in memory."""
    facts: list[SplitFacts] = []
    opened: list[_TermsFile] = []
    for data in splits:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            facts.append(msgspec.json.decode(archive.read(SPLIT_FACTS), type=SplitFacts))
            opened.append(_TermsFile(archive.read(SPLIT_TERMS)))
    split = _merge_facts(facts)
    stored = build_file_facts(FTS, covers)
    kept = {field.field: field.positions for field in split.text} | dict.fromkeys(split.keyword, False)
    groups = (
        group
        for name in sorted(kept)
        for group in cut_row_groups(_merge_field_terms(name, opened, positions=kept[name]), GROUP_ROWS)
    )
    data = zip_split(write_terms(groups, stored), split, stored)
    return BuiltIndexFile(FTS, data, covers.rows, {"tokens": sum(field.tokens for field in split.text)})


def split_row_count(split: bytes) -> int:
    """How many entries a split speaks for."""
    with zipfile.ZipFile(io.BytesIO(split)) as archive:
        return int(msgspec.json.decode(archive.read(SPLIT_FACTS))["rows"])


def _merge_facts(facts: Sequence[SplitFacts]) -> SplitFacts:
    first = facts[0]
    text = [
        msgspec.structs.replace(
            field,
            documents=sum(one.text[place].documents for one in facts),
            tokens=sum(one.text[place].tokens for one in facts),
        )
        for place, field in enumerate(first.text)
    ]
    return SplitFacts(text, first.keyword)


def _merge_field_terms(name: str, splits: Sequence[_TermsFile], *, positions: bool) -> Iterator[Any]:
    """The postings of one field, terms in order, entries of each term one after the other."""
    table = pa.concat_tables([split.rows_of(name) for split in splits]).combine_chunks()
    if not table.num_rows:
        return
    absent = table.column(TERM).is_null()
    every = table.filter(absent)
    yield all_entries_table(name, _flatten_lists(every, ENTRIES), _flatten_lists(every, FREQUENCIES))
    for rows in _iter_term_rows(table):
        yield _merge_terms(name, table.take(pa.array(rows)), positions)


def _iter_term_rows(table: Any) -> Iterator[Any]:
    """The places of rows with a term, whole terms at a time, as many as make a piece."""
    ranks, count = _term_ranks(table.column(TERM))
    rows = stable_argsort(ranks + 1, count + 1)  # those without a term come first, and are left out
    rows = rows[int((ranks < 0).sum()) :]
    if not len(rows):
        return
    sizes = to_numpy(pc.list_value_length(table.column(ENTRIES))).astype(np.int64)[rows]
    firsts = np.flatnonzero(np.diff(ranks[rows], prepend=-1))
    piece = offsets_from_counts(sizes)[firsts] // MERGE_POSTINGS
    cuts = firsts[np.flatnonzero(np.diff(piece)) + 1].tolist()
    for first, last in pairwise([0, *cuts, len(rows)]):
        yield np.sort(rows[first:last])  # splits stay in their order


def _term_ranks(terms: Any) -> tuple[Any, int]:
    """Of each row the place of its term among all of them, -1 if it has none; and how many there are."""
    encoded = terms.combine_chunks().dictionary_encode()
    order = to_numpy(pc.sort_indices(encoded.dictionary)).astype(np.int64)
    rank = np.full(len(order) + 1, -1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[to_numpy(encoded.indices.fill_null(-1))], len(order)


def _merge_terms(name: str, table: Any, positions: bool) -> Any:
    encoded = table.column(TERM).combine_chunks().dictionary_encode()
    order = to_numpy(pc.sort_indices(encoded.dictionary)).astype(np.int64)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    counts = to_numpy(pc.list_value_length(table.column(ENTRIES))).astype(np.int64)
    ranks = np.repeat(rank[to_numpy(encoded.indices)], counts)
    moved = stable_argsort(ranks, len(order))
    frequencies = _flatten_lists(table, FREQUENCIES)
    where = None
    if positions:
        places = expand_spans(
            offsets_from_counts(frequencies)[:-1][moved], frequencies[moved].astype(np.int64)
        )
        where = _flatten_lists(table, POSITIONS)[places]
    postings = Postings(_flatten_lists(table, ENTRIES)[moved], frequencies[moved], where)
    offsets = offsets_from_counts(np.bincount(ranks, minlength=len(order)))
    return build_terms_table(name, encoded.dictionary.take(pa.array(order)), offsets, postings)


def _flatten_lists(table: Any, name: str) -> Any:
    """What is in all lists of a column."""
    return to_numpy(table.column(name).combine_chunks().flatten())
