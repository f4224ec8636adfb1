"""`fts`: a split of the text index. A Tantivy directory, a table of terms and some facts, in one zip."""

from __future__ import annotations

import io
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import tantivy

from tailrace.pipeline.kernels.arrays import (
    INT32,
    INT64,
    INT64_LIST,
    STRING,
    from_numpy,
    list_of,
    lists,
    np,
    offsets_of,
    pa,
    pc,
    to_numpy,
)
from tailrace.pipeline.kernels.batch import Batch
from tailrace.pipeline.kernels.columns import FieldColumn
from tailrace.pipeline.kernels.parquet import Built, CompanionWriter, Range, facts_of
from tailrace.query.analyze import cut, tokens_of
from tailrace.query.family_format import (
    DOCUMENTS,
    ENTRIES,
    ENTRY,
    FACT_PREFIX,
    FIELD,
    FREQUENCIES,
    FTS,
    LIST_ENTRIES_MAX,
    SPLIT_FACTS,
    SPLIT_INDEX,
    SPLIT_TERMS,
    TERM,
    TOKENIZER,
    length_field,
)
from tailrace.schema.search_config import Field, SearchConfig

HEAP_BYTES: Final = 64 << 20
GROUP_ROWS: Final = 4096
REMOVE_TRIES: Final = 100
REMOVE_PAUSE_S: Final = 0.02

_FREQUENCY_LIST: Final = list_of(INT32)
TERMS_SCHEMA: Final = pa.schema(
    [
        pa.field(FIELD, STRING, nullable=False),
        pa.field(TERM, STRING),
        pa.field(DOCUMENTS, INT64, nullable=False),
        pa.field(ENTRIES, INT64_LIST, nullable=False),
        pa.field(FREQUENCIES, _FREQUENCY_LIST, nullable=False),
    ]
)
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first one a zip can have
_LOCKS: Final = frozenset({".tantivy-writer.lock", ".tantivy-meta.lock"})


class TextStats(msgspec.Struct):
    """What scores need to know of one text field of a split."""

    field: str
    length: str  # the fast field with counts of tokens
    documents: int
    tokens: int
    positions: bool


class SplitFacts(msgspec.Struct):
    """`split.json`, but for the facts that every companion has."""

    text: list[TextStats]
    keyword: list[str]


class _Texts:
    """The tokens of one text field, collected as flat columns."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.terms: list[Any] = []  # code of each token
        self.of: list[Any] = []  # entry of each token
        self.entries: list[Any] = []  # entries with a value, and their counts of tokens
        self.lengths: list[Any] = []


class FtsBuilder:
    def __init__(self, covers: Range, config: SearchConfig, fields: Sequence[str], directory: Path) -> None:
        self._covers = covers
        found = {name: config.fields[name] for name in sorted(fields)}
        self._texts = {name: _Texts() for name, field in found.items() if field.kind == "text"}
        # What is exact or a column answers prefixes from there: ids that never repeat would fill the index.
        self._keywords = [
            name for name, field in found.items() if field.kind != "text" and not is_elsewhere(field)
        ]
        self._positions = {name: found[name].positions for name in self._texts}
        self._home = Path(tempfile.mkdtemp(dir=directory))
        index = tantivy.Index(split_schema(self._positions, self._keywords), path=str(self._home))
        self._writer: Any = index.writer(heap_size=HEAP_BYTES, num_threads=1)

    def add(self, batch: Batch) -> None:
        documents: dict[int, dict[str, Any]] = {}
        entries: list[int] = batch.entries.tolist()
        for index, (name, texts) in enumerate(self._texts.items()):
            column = batch.column(name)
            if len(column.rows):
                lengths = self._add_texts(name, texts, column, batch.entries, documents)
                for row, length in zip(column.present.tolist(), lengths.tolist(), strict=True):
                    documents[row][length_field(index)] = length
        for name in self._keywords:
            column = batch.column(name)
            values: list[str] = column.values.to_pylist()
            for row, value in zip(column.rows.tolist(), values, strict=True):
                documents.setdefault(row, {}).setdefault(name, []).append(cut(value))
        add, make = self._writer.add_document, tantivy.Document
        for row, document in documents.items():
            add(make(**{ENTRY: entries[row]}, **document))

    def _add_texts(
        self,
        name: str,
        texts: _Texts,
        column: FieldColumn,
        entries: Any,
        documents: dict[int, dict[str, Any]],
    ) -> Any:
        """Tokens of a batch into the columns and the documents; answers the lengths of rows with a value."""
        rows: list[int] = column.rows.tolist()
        found = [tokens_of(value) for value in column.values.to_pylist()]
        for row, tokens in zip(rows, found, strict=True):
            documents.setdefault(row, {}).setdefault(name, []).append(" ".join(tokens))
        counts = np.fromiter(map(len, found), np.int64, len(found))
        codes = texts.codes
        flat = [codes.setdefault(token, len(codes)) for tokens in found for token in tokens]
        texts.terms.append(np.array(flat, dtype=np.int64))
        texts.of.append(np.repeat(entries[column.rows], counts))
        present = column.present
        lengths = np.add.reduceat(counts, column.offsets[:-1][present])
        texts.entries.append(entries[present])
        texts.lengths.append(lengths)
        return lengths

    def finish(self) -> list[Built]:
        self._writer.commit()
        self._writer.wait_merging_threads()
        facts = facts_of(FTS, self._covers)
        stats = [self._stats(index, name) for index, name in enumerate(self._texts)]
        split = SplitFacts(stats, self._keywords)
        terms = write_terms((self._table(name) for name in self._texts), facts)
        data = zip_split(self._home, terms, split, facts)
        self._writer = None
        remove_tree(self._home)
        return [Built(FTS, data, self._covers.rows, {"tokens": sum(field.tokens for field in stats)})]

    def _stats(self, index: int, name: str) -> TextStats:
        texts = self._texts[name]
        lengths = np.concatenate(texts.lengths) if texts.lengths else np.zeros(0, np.int64)
        documents, tokens = int((lengths > 0).sum()), int(lengths.sum())
        return TextStats(name, length_field(index), documents, tokens, self._positions[name])

    def _table(self, name: str) -> Any:
        """The terms of a field in order, before them the row of all entries with a value."""
        texts = self._texts[name]
        if not texts.entries:
            return TERMS_SCHEMA.empty_table()
        present, lengths = np.concatenate(texts.entries), np.concatenate(texts.lengths)
        every = terms_table(name, pa.nulls(1, STRING), np.array([0, len(present)]), present, lengths)
        if not texts.codes:
            return every
        dictionary = pa.array(list(texts.codes), STRING)
        order = to_numpy(pc.sort_indices(dictionary)).astype(np.int64)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        ranks, entries = rank[np.concatenate(texts.terms)], np.concatenate(texts.of)
        by_term = np.argsort(ranks, kind="stable")
        ranks, entries = ranks[by_term], entries[by_term]
        fresh = np.ones(len(ranks), dtype=bool)
        fresh[1:] = (np.diff(ranks) != 0) | (np.diff(entries) != 0)
        starts = np.flatnonzero(fresh)
        frequencies = np.diff(np.append(starts, len(ranks)))
        offsets = offsets_of(np.bincount(ranks[starts], minlength=len(order)))
        terms = dictionary.take(pa.array(order))
        return pa.concat_tables([every, terms_table(name, terms, offsets, entries[starts], frequencies)])


def remove_tree(directory: Path) -> None:
    """The library's threads may still write a last file or two when they have said that they are done."""
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(REMOVE_PAUSE_S)


def is_elsewhere(field: Field) -> bool:
    """Whether another family has the values of a keyword in order."""
    return field.exact or field.column or field.sortable or field.aggregatable


def split_schema(positions: dict[str, bool], keywords: Iterable[str]) -> Any:
    """The Tantivy schema of a split."""
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field(ENTRY, fast=True)
    for index, (name, kept) in enumerate(positions.items()):
        option = "position" if kept else "freq"
        builder.add_text_field(name, tokenizer_name=TOKENIZER, index_option=option)
        builder.add_integer_field(length_field(index), fast=True)
    for name in keywords:
        builder.add_text_field(name, tokenizer_name="raw", index_option="basic")
    return builder.build()


def terms_table(name: str, terms: Any, offsets: Any, entries: Any, frequencies: Any) -> Any:
    """Rows of one field. Lists that are too long go on in further rows."""
    counts = np.diff(offsets)
    documents = counts
    if len(counts) and counts.max() > LIST_ENTRIES_MAX:
        pieces = -(-counts // LIST_ENTRIES_MAX)
        starts = np.concatenate([np.arange(*span, LIST_ENTRIES_MAX) for span in pairwise(offsets.tolist())])
        which = np.repeat(np.arange(len(counts)), pieces)
        terms, documents = terms.take(pa.array(which)), counts[which]
        offsets = np.append(starts, offsets[-1])
    columns = [
        pa.array([name]).take(pa.array(np.zeros(len(terms), np.int64))),
        terms,
        from_numpy(documents.astype(np.int64), INT64),
        lists(INT64_LIST, offsets, from_numpy(entries.astype(np.int64), INT64)),
        lists(_FREQUENCY_LIST, offsets, from_numpy(frequencies.astype(np.int32), INT32)),
    ]
    return pa.Table.from_arrays(columns, schema=TERMS_SCHEMA)


def write_terms(tables: Iterable[Any], facts: dict[str, str]) -> bytes:
    """Sorted tables, one for each field, as a file."""
    packed = [DOCUMENTS, f"{ENTRIES}.list.element", f"{FREQUENCIES}.list.element"]
    with CompanionWriter(TERMS_SCHEMA, facts, repeated=[FIELD], packed=packed) as writer:
        for table in tables:
            for at in range(0, table.num_rows, GROUP_ROWS):
                writer.write(table.slice(at, GROUP_ROWS).combine_chunks())
        return writer.finish()


def zip_split(directory: Path, terms: bytes, split: SplitFacts, facts: dict[str, str]) -> bytes:
    """The members in a fixed order, stored as they are."""
    shown: dict[str, object] = {name.removeprefix(FACT_PREFIX): value for name, value in facts.items()}
    shown |= msgspec.to_builtins(split)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(SPLIT_FACTS, _DATE), msgspec.json.encode(shown))
        archive.writestr(zipfile.ZipInfo(SPLIT_TERMS, _DATE), terms)
        for path in _files(directory):
            archive.writestr(zipfile.ZipInfo(SPLIT_INDEX + path.name, _DATE), path.read_bytes())
    return out.getvalue()


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name not in _LOCKS:
            yield path
