"""`fts`: a split of the text index. A table of terms and some facts, in one zip."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tailrace.schema.search_config import Field, SearchConfig
from tailrace.search.index_files.format import FACT_PREFIX, FTS, KEYWORD_BYTES_MAX, SPLIT_FACTS, SPLIT_TERMS
from tailrace.search.records import truncate_token
from tailrace.spark.index.arrays import argsort_bytes, np, offsets_from_counts, stable_argsort, to_numpy
from tailrace.spark.index.batch import SegmentBatch
from tailrace.spark.index.columns import FieldColumn
from tailrace.spark.index.parquet import BuiltIndexFile, IndexedRange, build_file_facts
from tailrace.spark.index.postings import (
    TERMS_SCHEMA,
    Postings,
    all_entries_table,
    build_terms_table,
    write_terms,
)
from tailrace.spark.index.words import tokenize_column
from tailrace.storage.segments.parquet import STRING, pa, pc

_ZIP_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first one a zip can have


class TextStats(msgspec.Struct):
    """What scores need to know of one text field of a split."""

    field: str
    documents: int
    tokens: int
    positions: bool


class SplitFacts(msgspec.Struct):
    """`split.json`, but for the facts that every companion has."""

    text: list[TextStats]
    keyword: list[str]


class _FieldTokens:
    """The tokens of one field in the order of the records, as flat columns."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []  # Arrow dictionaries of texts
        self.entries: list[Any] = []  # the entry of each value, and how many tokens it has
        self.counts: list[Any] = []

    def add(self, column: FieldColumn, entries: Any, tokens: Any, counts: Any) -> None:
        self.tokens.append(tokens.dictionary_encode())
        self.entries.append(entries[column.rows])
        self.counts.append(counts.astype(np.int32))


class FullTextBuilder:
    def __init__(self, covers: IndexedRange, config: SearchConfig, fields: Sequence[str]) -> None:
        self._covers = covers
        found = {name: config.fields[name] for name in sorted(fields)}
        self._positions = {name: field.positions for name, field in found.items() if field.kind == "text"}
        # What is exact or a column answers prefixes from there: ids that never repeat would fill the index.
        self._keywords = [
            name for name, field in found.items() if field.kind != "text" and not is_indexed_elsewhere(field)
        ]
        self._held = {name: _FieldTokens() for name in sorted([*self._positions, *self._keywords])}

    def add(self, batch: SegmentBatch) -> None:
        for name, held in self._held.items():
            column = batch.column(name)
            if len(column.rows):
                found = (
                    tokenize_column(column.values)
                    if name in self._positions
                    else _keyword_tokens(column.values)
                )
                held.add(column, batch.entries, *found)

    def finish(self) -> list[BuiltIndexFile]:
        facts = build_file_facts(FTS, self._covers)
        stats: list[TextStats] = []
        terms = write_terms((self._table(name, stats) for name in self._held), facts)
        data = zip_split(terms, SplitFacts(stats, self._keywords), facts)
        return [
            BuiltIndexFile(FTS, data, self._covers.rows, {"tokens": sum(field.tokens for field in stats)})
        ]

    def _table(self, name: str, stats: list[TextStats]) -> Any:
        """The terms of a field in order, before them the row of all entries with a value."""
        held = self._held[name]
        positions = self._positions.get(name)
        if not held.entries:
            if positions is not None:
                stats.append(TextStats(name, 0, 0, positions))
            return TERMS_SCHEMA.empty_table()
        entries, counts = np.concatenate(held.entries), np.concatenate(held.counts)
        firsts = np.flatnonzero(np.diff(entries, prepend=entries[0] - 1))  # values of a record lie together
        lengths = np.add.reduceat(counts, firsts)
        if positions is not None:
            stats.append(TextStats(name, int((lengths > 0).sum()), int(lengths.sum()), positions))
        every = all_entries_table(name, entries[firsts], lengths)
        terms, ranks = _rank_terms(held.tokens)
        if not len(terms):
            return every
        where = _token_positions(counts, firsts) if positions else None
        return pa.concat_tables(
            [every, _group_by_term(name, terms, ranks, np.repeat(entries, counts), where)]
        )


def _keyword_tokens(values: Any) -> tuple[Any, Any]:
    """Keywords are one token each, of which as much is kept as of any other."""
    if len(values) and pc.max(pc.binary_length(values)).as_py() > KEYWORD_BYTES_MAX:
        values = pa.array([truncate_token(value) for value in values.to_pylist()], STRING)
    return values, np.ones(len(values), np.int64)


def _rank_terms(tokens: Sequence[Any]) -> tuple[Any, Any]:
    """The different terms in order, and for each token which of them it is."""
    unified = pa.chunked_array(tokens).unify_dictionaries()
    dictionary = unified.chunk(0).dictionary
    order = argsort_bytes(dictionary)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    codes = np.concatenate([to_numpy(chunk.indices) for chunk in unified.chunks])
    return dictionary.take(pa.array(order)), rank[codes]


def _token_positions(counts: Any, firsts: Any) -> Any:
    """The place of each token in its record. One place between two values stays empty: no phrase spans it."""
    begins = offsets_from_counts(counts + 1)[:-1]
    of_record = np.zeros_like(begins)
    of_record[firsts] = begins[firsts]
    inside = begins - np.maximum.accumulate(of_record)
    return np.arange(counts.sum()) - np.repeat(offsets_from_counts(counts)[:-1] - inside, counts)


def _group_by_term(name: str, terms: Any, ranks: Any, entries: Any, positions: Any) -> Any:
    """Entries by term; how often each has it is how often it comes."""
    by_term = stable_argsort(ranks, len(terms))
    ranks, entries = ranks[by_term], entries[by_term]
    fresh = np.ones(len(ranks), dtype=bool)
    fresh[1:] = (np.diff(ranks) != 0) | (np.diff(entries) != 0)
    starts = np.flatnonzero(fresh)
    frequencies = np.diff(np.append(starts, len(ranks)))
    offsets = offsets_from_counts(np.bincount(ranks[starts], minlength=len(terms)))
    where = None if positions is None else positions[by_term]
    return build_terms_table(name, terms, offsets, Postings(entries[starts], frequencies, where))


def is_indexed_elsewhere(field: Field) -> bool:
    """Whether another family has the values of a keyword in order."""
    return field.exact or field.column or field.sortable or field.aggregatable


def zip_split(terms: bytes, split: SplitFacts, facts: dict[str, str]) -> bytes:
    """The members in a fixed order, stored as they are."""
    shown: dict[str, object] = {name.removeprefix(FACT_PREFIX): value for name, value in facts.items()}
    shown |= msgspec.to_builtins(split)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(SPLIT_FACTS, _ZIP_DATE), msgspec.json.encode(shown))
        archive.writestr(zipfile.ZipInfo(SPLIT_TERMS, _ZIP_DATE), terms)
    return out.getvalue()
