"""`fts` index files, the full-text index: tokens, postings, splits, and merges of splits.

A split is a zip archive of a terms table (the entries of each term, with frequencies and positions) and
`split.json` with the facts that scoring needs. Tokenizing is vectorized for ASCII;
`search.records.tokenize_text` defines what a token is. A merge joins the postings of several splits, a
bounded number at a time.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec

from tailrace.schema.search_config import Field, SearchConfig
from tailrace.search.index_files.format import (
    DOCUMENTS,
    ENTRIES,
    FACT_PREFIX,
    FIELD,
    FREQUENCIES,
    FTS,
    KEYWORD_BYTES_MAX,
    LIST_ENTRIES_MAX,
    POSITIONS,
    SPLIT_FACTS,
    SPLIT_TERMS,
    TERM,
)
from tailrace.search.records import TOKEN_BYTES_MAX, tokenize_text, truncate_token
from tailrace.spark.index.arrays import (
    INT64_LIST,
    argsort_bytes,
    build_list_array,
    expand_spans,
    from_numpy,
    list_type,
    np,
    offsets_from_counts,
    stable_argsort,
    to_numpy,
)
from tailrace.spark.index.file_writer import (
    BuiltIndexFile,
    IndexedRange,
    IndexFileWriter,
    build_file_facts,
    cut_row_groups,
)
from tailrace.spark.index.segment_batches import FieldColumn, SegmentBatch
from tailrace.storage.segments.parquet import INT32, INT64, STRING, pa, pc, pq

# The token byte of each ASCII byte; 0 if it is no part of a token.
_ASCII_TOKEN_BYTES: Final = np.array(
    [ord(chr(at).lower()) if chr(at).isalnum() else 0 for at in range(128)], np.uint8
)


def tokenize_column(values: Any) -> tuple[Any, Any]:
    """The tokens of all texts, concatenated, and the number of tokens of each text."""
    is_ascii = pc.string_is_ascii(values)
    if not pc.any(is_ascii, min_count=0).as_py():
        return _tokenize_distinct(values)
    tokens, counts = _tokenize_ascii(values.filter(is_ascii))
    if len(tokens) and pc.max(pc.binary_length(tokens)).as_py() > TOKEN_BYTES_MAX:
        return _tokenize_distinct(values)
    marks = to_numpy(is_ascii)
    if marks.all():
        return tokens, counts
    return _interleave_tokens(marks, (tokens, counts), _tokenize_distinct(values.filter(pc.invert(is_ascii))))


def _interleave_tokens(marks: Any, marked: tuple[Any, Any], others: tuple[Any, Any]) -> tuple[Any, Any]:
    """Tokens of marked texts and of the others, in the order of the texts."""
    counts = np.empty(len(marks), np.int64)
    counts[marks], counts[~marks] = marked[1], others[1]
    starts = np.empty(len(marks), np.int64)
    starts[marks] = offsets_from_counts(marked[1])[:-1]
    starts[~marks] = offsets_from_counts(others[1])[:-1] + len(marked[0])
    encoded = pa.concat_arrays([marked[0], others[0]]).dictionary_encode()
    return encoded.take(pa.array(expand_spans(starts, counts))), counts


def _tokenize_ascii(values: Any) -> tuple[Any, Any]:
    """For ASCII, byte tables give the same tokens as `tokenize_text`."""
    _, starts, data = values.buffers()
    edges = np.frombuffer(starts, np.int32)[values.offset : values.offset + len(values) + 1]
    raw = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]] if data is not None else np.zeros(0, np.uint8)
    edges = edges - edges[0]
    letters = _ASCII_TOKEN_BYTES[raw]
    inside = letters != 0
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    texts = edges[:-1][edges[:-1] < len(raw)]
    begins[texts] = inside[texts]
    at = np.flatnonzero(begins)
    token_bytes = letters[inside]
    offsets = np.append(np.cumsum(inside)[at] - 1, len(token_bytes)).astype(np.int32)
    tokens = pa.Array.from_buffers(STRING, len(at), [None, pa.py_buffer(offsets), pa.py_buffer(token_bytes)])
    return tokens, np.diff(np.searchsorted(at, edges))


def _tokenize_distinct(values: Any) -> tuple[Any, Any]:
    """`tokenize_text`, called once per distinct text."""
    encoded = values.dictionary_encode()
    found = [tokenize_text(text) for text in encoded.dictionary.to_pylist()]
    counts = np.fromiter(map(len, found), np.int64, len(found))
    flat = pa.array([token for tokens in found for token in tokens], STRING)
    which = to_numpy(encoded.indices)
    return flat.take(pa.array(expand_spans(offsets_from_counts(counts)[which], counts[which]))), counts[which]


GROUP_ROWS: Final = 4096

_INT32_LIST: Final = list_type(INT32)
TERMS_SCHEMA: Final = pa.schema(
    [
        pa.field(FIELD, STRING, nullable=False),
        pa.field(TERM, STRING),
        pa.field(DOCUMENTS, INT64, nullable=False),
        pa.field(ENTRIES, INT64_LIST, nullable=False),
        pa.field(FREQUENCIES, _INT32_LIST, nullable=False),
        pa.field(POSITIONS, _INT32_LIST, nullable=False),
    ]
)


class Postings(NamedTuple):
    """Entries with their term frequencies and, if positions are indexed, as many positions each."""

    entries: Any
    frequencies: Any
    positions: Any = None


def build_terms_table(name: str, terms: Any, offsets: Any, postings: Postings) -> Any:
    """The rows of one field. Lists longer than LIST_ENTRIES_MAX continue in further rows."""
    counts = np.diff(offsets)
    documents = counts
    if len(counts) and counts.max() > LIST_ENTRIES_MAX:
        pieces = -(-counts // LIST_ENTRIES_MAX)
        starts = np.concatenate([np.arange(*span, LIST_ENTRIES_MAX) for span in pairwise(offsets.tolist())])
        which = np.repeat(np.arange(len(counts)), pieces)
        terms, documents = terms.take(pa.array(which)), counts[which]
        offsets = np.append(starts, offsets[-1])
    entries, frequencies, positions = postings
    places = np.zeros_like(offsets)
    if positions is None:
        positions = np.zeros(0, np.int32)
    else:
        places = offsets_from_counts(frequencies)[offsets]
    columns = [
        pa.array([name]).take(pa.array(np.zeros(len(terms), np.int64))),
        terms,
        from_numpy(documents.astype(np.int64), INT64),
        build_list_array(INT64_LIST, offsets, from_numpy(entries.astype(np.int64), INT64)),
        build_list_array(_INT32_LIST, offsets, from_numpy(frequencies.astype(np.int32), INT32)),
        build_list_array(_INT32_LIST, places, from_numpy(positions.astype(np.int32), INT32)),
    ]
    return pa.Table.from_arrays(columns, schema=TERMS_SCHEMA)


def all_entries_table(name: str, entries: Any, lengths: Any) -> Any:
    """The row without a term: all entries with a value of the field, and their numbers of tokens."""
    return build_terms_table(
        name, pa.nulls(1, STRING), np.array([0, len(entries)]), Postings(entries, lengths)
    )


def write_terms(tables: Iterable[Any], facts: dict[str, str]) -> bytes:
    """Write sorted tables, one or more per field."""
    delta = [DOCUMENTS, f"{ENTRIES}.list.element", f"{FREQUENCIES}.list.element"]
    dictionary = [FIELD, f"{POSITIONS}.list.element"]  # most positions are one of a few numbers
    with IndexFileWriter(TERMS_SCHEMA, facts, dictionary=dictionary, delta=delta) as writer:
        for table in tables:
            for at in range(0, table.num_rows, GROUP_ROWS):
                writer.write(table.slice(at, GROUP_ROWS).combine_chunks())
        return writer.finish()


_ZIP_DATE: Final = (
    1980,
    1,
    1,
    0,
    0,
    0,
)  # constant, so that files are deterministic


class TextStats(msgspec.Struct):
    """Statistics of one text field of a split, for scoring."""

    field: str
    documents: int
    tokens: int
    positions: bool


class SplitFacts(msgspec.Struct):
    """`split.json` without the facts that every index file has."""

    text: list[TextStats]
    keyword: list[str]


class _FieldTokens:
    """The tokens of one field in record order, as flat columns."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []  # Arrow dictionaries of texts
        self.entries: list[Any] = []  # the entry of each value
        self.counts: list[Any] = []  # the number of tokens of each value

    def add(self, column: FieldColumn, entries: Any, tokens: Any, counts: Any) -> None:
        self.tokens.append(tokens.dictionary_encode())
        self.entries.append(entries[column.rows])
        self.counts.append(counts.astype(np.int32))


class FullTextBuilder:
    def __init__(self, covers: IndexedRange, config: SearchConfig, fields: Sequence[str]) -> None:
        self._covers = covers
        found = {name: config.fields[name] for name in sorted(fields)}
        self._positions = {name: field.positions for name, field in found.items() if field.kind == "text"}
        # Fields in `exact` or `col` serve prefix queries from there: unique ids would fill this index.
        self._keywords = [
            name for name, field in found.items() if field.kind != "text" and not is_indexed_elsewhere(field)
        ]
        self._tokens = {name: _FieldTokens() for name in sorted([*self._positions, *self._keywords])}

    def add(self, batch: SegmentBatch) -> None:
        for name, tokens in self._tokens.items():
            column = batch.column(name)
            if len(column.rows):
                found = (
                    tokenize_column(column.values)
                    if name in self._positions
                    else _keyword_tokens(column.values)
                )
                tokens.add(column, batch.entries, *found)

    def finish(self) -> list[BuiltIndexFile]:
        facts = build_file_facts(FTS, self._covers)
        stats: list[TextStats] = []
        terms = write_terms((self._table(name, stats) for name in self._tokens), facts)
        data = zip_split(terms, SplitFacts(stats, self._keywords), facts)
        return [
            BuiltIndexFile(FTS, data, self._covers.rows, {"tokens": sum(field.tokens for field in stats)})
        ]

    def _table(self, name: str, stats: list[TextStats]) -> Any:
        """The row of all entries with a value, followed by the terms of the field in order."""
        collected = self._tokens[name]
        positions = self._positions.get(name)
        if not collected.entries:
            if positions is not None:
                stats.append(TextStats(name, 0, 0, positions))
            return TERMS_SCHEMA.empty_table()
        entries, counts = np.concatenate(collected.entries), np.concatenate(collected.counts)
        firsts = np.flatnonzero(np.diff(entries, prepend=entries[0] - 1))  # values of a record are adjacent
        lengths = np.add.reduceat(counts, firsts)
        if positions is not None:
            stats.append(TextStats(name, int((lengths > 0).sum()), int(lengths.sum()), positions))
        every = all_entries_table(name, entries[firsts], lengths)
        terms, ranks = _rank_terms(collected.tokens)
        if not len(terms):
            return every
        where = _token_positions(counts, firsts) if positions else None
        return pa.concat_tables(
            [every, _group_by_term(name, terms, ranks, np.repeat(entries, counts), where)]
        )


def _keyword_tokens(values: Any) -> tuple[Any, Any]:
    """A keyword is one token, truncated like any other."""
    if len(values) and pc.max(pc.binary_length(values)).as_py() > KEYWORD_BYTES_MAX:
        values = pa.array([truncate_token(value) for value in values.to_pylist()], STRING)
    return values, np.ones(len(values), np.int64)


def _rank_terms(tokens: Sequence[Any]) -> tuple[Any, Any]:
    """The distinct terms in order, and the rank of each token among them."""
    unified = pa.chunked_array(tokens).unify_dictionaries()
    dictionary = unified.chunk(0).dictionary
    order = argsort_bytes(dictionary)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    codes = np.concatenate([to_numpy(chunk.indices) for chunk in unified.chunks])
    return dictionary.take(pa.array(order)), rank[codes]


def _token_positions(counts: Any, firsts: Any) -> Any:
    """The position of each token in its record. A gap between two values keeps phrases from spanning them."""
    begins = offsets_from_counts(counts + 1)[:-1]
    of_record = np.zeros_like(begins)
    of_record[firsts] = begins[firsts]
    inside = begins - np.maximum.accumulate(of_record)
    return np.arange(counts.sum()) - np.repeat(offsets_from_counts(counts)[:-1] - inside, counts)


def _group_by_term(name: str, terms: Any, ranks: Any, entries: Any, positions: Any) -> Any:
    """Entries grouped by term, with their frequencies."""
    by_term = stable_argsort(ranks, len(terms))
    ranks, entries = ranks[by_term], entries[by_term]
    is_start = np.ones(len(ranks), dtype=bool)
    is_start[1:] = (np.diff(ranks) != 0) | (np.diff(entries) != 0)
    starts = np.flatnonzero(is_start)
    frequencies = np.diff(np.append(starts, len(ranks)))
    offsets = offsets_from_counts(np.bincount(ranks[starts], minlength=len(terms)))
    where = None if positions is None else positions[by_term]
    return build_terms_table(name, terms, offsets, Postings(entries[starts], frequencies, where))


def is_indexed_elsewhere(field: Field) -> bool:
    """Whether another index family has the values of a keyword in order."""
    return field.exact or field.column or field.sortable or field.aggregatable


def zip_split(terms: bytes, split: SplitFacts, facts: dict[str, str]) -> bytes:
    """The archive with its members in a fixed order, uncompressed."""
    shown: dict[str, object] = {name.removeprefix(FACT_PREFIX): value for name, value in facts.items()}
    shown |= msgspec.to_builtins(split)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(SPLIT_FACTS, _ZIP_DATE), msgspec.json.encode(shown))
        archive.writestr(zipfile.ZipInfo(SPLIT_TERMS, _ZIP_DATE), terms)
    return out.getvalue()


MERGE_POSTINGS: Final = 1 << 18  # sorted at a time


class _TermsFile:
    """The terms table of one split. Each of its row groups has one field."""

    def __init__(self, terms: bytes) -> None:
        self._file: Any = pq.ParquetFile(pa.BufferReader(terms))
        metadata, names = self._file.metadata, self._file.schema_arrow.names
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        self._fields: list[str] = [group.column(names.index(FIELD)).statistics.min for group in groups]

    def read_field(self, field: str) -> Any:
        places = [place for place, name in enumerate(self._fields) if name == field]
        return self._file.read_row_groups(places, use_threads=False).cast(TERMS_SCHEMA)


def merge_splits(splits: Sequence[bytes], covers: IndexedRange) -> BuiltIndexFile:
    """Merge splits of one plan, given in entry order. One field at a time is in memory."""
    facts: list[SplitFacts] = []
    opened: list[_TermsFile] = []
    for data in splits:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            facts.append(msgspec.json.decode(archive.read(SPLIT_FACTS), type=SplitFacts))
            opened.append(_TermsFile(archive.read(SPLIT_TERMS)))
    split = _merge_facts(facts)
    stored = build_file_facts(FTS, covers)
    positions = {field.field: field.positions for field in split.text} | dict.fromkeys(split.keyword, False)
    groups = (
        group
        for name in sorted(positions)
        for group in cut_row_groups(_merge_field_terms(name, opened, positions=positions[name]), GROUP_ROWS)
    )
    data = zip_split(write_terms(groups, stored), split, stored)
    return BuiltIndexFile(FTS, data, covers.rows, {"tokens": sum(field.tokens for field in split.text)})


def split_row_count(split: bytes) -> int:
    """The number of entries that a split covers."""
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
    """The postings of one field, terms in order, with the entries of each term in order."""
    table = pa.concat_tables([split.read_field(name) for split in splits]).combine_chunks()
    if not table.num_rows:
        return
    absent = table.column(TERM).is_null()
    every = table.filter(absent)
    yield all_entries_table(name, _flatten_lists(every, ENTRIES), _flatten_lists(every, FREQUENCIES))
    for rows in _iter_term_rows(table):
        yield _merge_terms(name, table.take(pa.array(rows)), positions)


def _iter_term_rows(table: Any) -> Iterator[Any]:
    """The indices of rows with a term, all rows of a term together, in pieces of about MERGE_POSTINGS."""
    ranks, count = _term_ranks(table.column(TERM))
    rows = stable_argsort(ranks + 1, count + 1)  # rows without a term come first and are dropped
    rows = rows[int((ranks < 0).sum()) :]
    if not len(rows):
        return
    sizes = to_numpy(pc.list_value_length(table.column(ENTRIES))).astype(np.int64)[rows]
    firsts = np.flatnonzero(np.diff(ranks[rows], prepend=-1))
    piece = offsets_from_counts(sizes)[firsts] // MERGE_POSTINGS
    cuts = firsts[np.flatnonzero(np.diff(piece)) + 1].tolist()
    for first, last in pairwise([0, *cuts, len(rows)]):
        yield np.sort(rows[first:last])  # in the order of the splits


def _term_ranks(terms: Any) -> tuple[Any, int]:
    """The rank of each row's term, -1 if it has none; and the number of distinct terms."""
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
    """The concatenated values of a list column."""
    return to_numpy(table.column(name).combine_chunks().flatten())
