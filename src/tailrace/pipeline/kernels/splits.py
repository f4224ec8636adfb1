"""Several text splits become one: the same documents in one directory, the same postings in one table."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import tantivy

from tailrace.pipeline.kernels.arrays import STRING, np, offsets_of, pa, pc, pq, to_numpy
from tailrace.pipeline.kernels.fts import (
    HEAP_BYTES,
    TERMS_SCHEMA,
    SplitFacts,
    terms_table,
    write_terms,
    zip_split,
)
from tailrace.pipeline.kernels.parquet import Built, Range, facts_of
from tailrace.query.family_format import (
    ENTRIES,
    FIELD,
    FREQUENCIES,
    FTS,
    SPLIT_FACTS,
    SPLIT_INDEX,
    SPLIT_TERMS,
    TERM,
)

_META: Final = "meta.json"
_MANAGED: Final = ".managed.json"

Meta = dict[str, Any]


def merge_splits(splits: Sequence[bytes], covers: Range, directory: Path) -> Built:
    """Splits of one plan, in the order of their entries. `directory` is empty, and used up."""
    facts: list[SplitFacts] = []
    metas: list[Meta] = []
    tables: list[Any] = []
    for data in splits:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            facts.append(msgspec.json.decode(archive.read(SPLIT_FACTS), type=SplitFacts))
            metas.append(msgspec.json.decode(archive.read(SPLIT_INDEX + _META)))
            tables.append(pq.read_table(pa.BufferReader(archive.read(SPLIT_TERMS)), schema=TERMS_SCHEMA))
            _unpack(archive, directory)
    _join_indexes(metas, directory)
    split = _joined_facts(facts)
    stored = facts_of(FTS, covers)
    names = [field.field for field in split.text]
    terms = write_terms((_merged_terms(name, tables) for name in names), stored)
    data = zip_split(directory, terms, split, stored)
    return Built(FTS, data, covers.rows, {"tokens": sum(field.tokens for field in split.text)})


def rows_in(split: bytes) -> int:
    """How many entries a split speaks for."""
    with zipfile.ZipFile(io.BytesIO(split)) as archive:
        return int(msgspec.json.decode(archive.read(SPLIT_FACTS))["rows"])


def _unpack(archive: zipfile.ZipFile, directory: Path) -> None:
    """The files of an index, whose names are random and so never meet."""
    for name in archive.namelist():
        bare = name.removeprefix(SPLIT_INDEX)
        if bare != name and bare not in (_META, _MANAGED) and "/" not in bare:
            with archive.open(name) as source, (directory / bare).open("xb") as target:
                shutil.copyfileobj(source, target)


def _join_indexes(metas: Sequence[Meta], directory: Path) -> None:
    """One list of all Tantivy segments. Committing has the library merge them as it sees fit."""
    joined = {**metas[0], "segments": [segment for meta in metas for segment in meta["segments"]]}
    managed = [_META, *sorted(path.name for path in directory.iterdir())]
    (directory / _META).write_bytes(msgspec.json.encode(joined))
    (directory / _MANAGED).write_bytes(msgspec.json.encode(managed))
    index = tantivy.Index.open(str(directory))
    writer = index.writer(heap_size=HEAP_BYTES, num_threads=1)
    writer.commit()
    writer.wait_merging_threads()
    cleaner = index.writer(heap_size=HEAP_BYTES, num_threads=1)
    cleaner.garbage_collect_files()
    cleaner.wait_merging_threads()


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


def _merged_terms(name: str, tables: Sequence[Any]) -> Any:
    """The postings of one field, terms in order, entries of each term one after the other."""
    parts = [table.filter(pc.equal(table.column(FIELD), name)) for table in tables]
    table = pa.concat_tables([part for part in parts if part.num_rows] or [parts[0]]).combine_chunks()
    if not table.num_rows:
        return table
    terms, entries = table.column(TERM).combine_chunks(), table.column(ENTRIES).combine_chunks()
    counts = to_numpy(pc.list_value_length(entries)).astype(np.int64)
    flat = to_numpy(entries.flatten())
    frequencies = to_numpy(table.column(FREQUENCIES).combine_chunks().flatten())
    absent = to_numpy(terms.is_null())
    distinct = pc.unique(terms.drop_null())
    order = to_numpy(pc.sort_indices(distinct)).astype(np.int64)
    sorted_terms = distinct.take(pa.array(order))
    place = pc.index_in(terms, sorted_terms)
    # The row of all entries, which has no term, comes first.
    ranks = np.where(absent, 0, to_numpy(pc.fill_null(place, 0)) + 1)
    by_rank = np.repeat(ranks, counts)
    moved = np.argsort(by_rank, kind="stable")
    offsets = offsets_of(np.bincount(by_rank, minlength=len(sorted_terms) + 1))
    labels = pa.concat_arrays([pa.nulls(1, STRING), sorted_terms])
    return terms_table(name, labels, offsets, flat[moved], frequencies[moved])
