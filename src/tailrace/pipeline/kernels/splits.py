"""Several text splits become one: the same postings in one table."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.pipeline.kernels.arrays import np, offsets_of, pa, pc, pq, spans, stable_order, to_numpy
from tailrace.pipeline.kernels.fts import SplitFacts, zip_split
from tailrace.pipeline.kernels.parquet import Built, Range, facts_of
from tailrace.pipeline.kernels.postings import TERMS_SCHEMA, Postings, every_entry, terms_table, write_terms
from tailrace.query.family_format import (
    ENTRIES,
    FIELD,
    FREQUENCIES,
    FTS,
    POSITIONS,
    SPLIT_FACTS,
    SPLIT_TERMS,
    TERM,
)


def merge_splits(splits: Sequence[bytes], covers: Range) -> Built:
    """Splits of one plan, in the order of their entries."""
    facts: list[SplitFacts] = []
    tables: list[Any] = []
    for data in splits:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            facts.append(msgspec.json.decode(archive.read(SPLIT_FACTS), type=SplitFacts))
            tables.append(pq.read_table(pa.BufferReader(archive.read(SPLIT_TERMS)), schema=TERMS_SCHEMA))
    split = _joined_facts(facts)
    stored = facts_of(FTS, covers)
    kept = {field.field: field.positions for field in split.text} | dict.fromkeys(split.keyword, False)
    terms = write_terms((_merged_terms(name, tables, positions=kept[name]) for name in sorted(kept)), stored)
    data = zip_split(terms, split, stored)
    return Built(FTS, data, covers.rows, {"tokens": sum(field.tokens for field in split.text)})


def rows_in(split: bytes) -> int:
    """How many entries a split speaks for."""
    with zipfile.ZipFile(io.BytesIO(split)) as archive:
        return int(msgspec.json.decode(archive.read(SPLIT_FACTS))["rows"])


def _joined_facts(facts: Sequence[SplitFacts]) -> SplitFacts:
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


def _merged_terms(name: str, tables: Sequence[Any], *, positions: bool) -> Any:
    """The postings of one field, terms in order, entries of each term one after the other."""
    parts = [table.filter(pc.equal(table.column(FIELD), name)) for table in tables]
    table = pa.concat_tables(parts).combine_chunks()
    if not table.num_rows:
        return table
    absent = table.column(TERM).is_null()
    every = table.filter(absent)
    first = every_entry(name, _flat(every, ENTRIES), _flat(every, FREQUENCIES))
    listed = table.filter(pc.invert(absent))
    return pa.concat_tables([first, _terms(name, listed, positions)]) if listed.num_rows else first


def _terms(name: str, table: Any, positions: bool) -> Any:
    encoded = table.column(TERM).combine_chunks().dictionary_encode()
    order = to_numpy(pc.sort_indices(encoded.dictionary)).astype(np.int64)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    counts = to_numpy(pc.list_value_length(table.column(ENTRIES))).astype(np.int64)
    ranks = np.repeat(rank[to_numpy(encoded.indices)], counts)
    moved = stable_order(ranks, len(order))
    frequencies = _flat(table, FREQUENCIES)
    where = None
    if positions:
        places = spans(offsets_of(frequencies)[:-1][moved], frequencies[moved].astype(np.int64))
        where = _flat(table, POSITIONS)[places]
    postings = Postings(_flat(table, ENTRIES)[moved], frequencies[moved], where)
    offsets = offsets_of(np.bincount(ranks, minlength=len(order)))
    return terms_table(name, encoded.dictionary.take(pa.array(order)), offsets, postings)


def _flat(table: Any, name: str) -> Any:
    """What is in all lists of a column."""
    return to_numpy(table.column(name).combine_chunks().flatten())
