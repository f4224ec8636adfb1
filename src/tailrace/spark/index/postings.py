"""The table of terms in a text split: which entries have a token, how often, and where."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

from tailrace.search.index_files.format import (
    DOCUMENTS,
    ENTRIES,
    FIELD,
    FREQUENCIES,
    LIST_ENTRIES_MAX,
    POSITIONS,
    TERM,
)
from tailrace.spark.index.arrays import (
    INT64_LIST,
    build_list_array,
    from_numpy,
    list_type,
    np,
    offsets_from_counts,
)
from tailrace.spark.index.parquet import IndexFileWriter
from tailrace.storage.segments.parquet import INT32, INT64, STRING, pa

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
    """Entries with how often each has something; where, as many places as that, unless nobody asks."""

    entries: Any
    frequencies: Any
    positions: Any = None


def build_terms_table(name: str, terms: Any, offsets: Any, postings: Postings) -> Any:
    """Rows of one field. Lists that are too long go on in further rows."""
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
    """The row without a term: all entries with a value of the field, and how many tokens each has."""
    return build_terms_table(
        name, pa.nulls(1, STRING), np.array([0, len(entries)]), Postings(entries, lengths)
    )


def write_terms(tables: Iterable[Any], facts: dict[str, str]) -> bytes:
    """Sorted tables, one for each field, as a file."""
    packed = [DOCUMENTS, f"{ENTRIES}.list.element", f"{FREQUENCIES}.list.element"]
    # Most tokens stand in one of a few places.
    repeated = [FIELD, f"{POSITIONS}.list.element"]
    with IndexFileWriter(TERMS_SCHEMA, facts, repeated=repeated, packed=packed) as writer:
        for table in tables:
            for at in range(0, table.num_rows, GROUP_ROWS):
                writer.write(table.slice(at, GROUP_ROWS).combine_chunks())
        return writer.finish()
