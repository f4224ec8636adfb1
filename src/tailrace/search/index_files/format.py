"""The format of index files: names of columns and metadata, and the encoding of values.

Shared by the builders and the readers. docs/companions.md describes the files. The names and numbers here are
stored in files and never change their meaning.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from tailrace.search.records import Value

ROUTING_KEY_INDEX: Final = "routing_key_index"
ROUTING_KEY_LEXICON: Final = "routing_key_lexicon"
EXACT: Final = "exact"
COL: Final = "col"
FTS: Final = "fts"
AGG: Final = "agg"
MBLK: Final = "mblk"
FAMILIES: Final = (ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON, EXACT, COL, FTS, AGG, MBLK)
# Format numbers. A file with another number is not read; a new number rebuilds all files of the family.
FORMATS: Final[dict[str, int]] = {**dict.fromkeys(FAMILIES, 1), FTS: 2, AGG: 2}
EXTENSIONS: Final = {**dict.fromkeys(FAMILIES, "parquet"), FTS: "zip"}

# -- facts in the footer of a Parquet file, and in `split.json` of a text split

FACT_PREFIX: Final = "tailrace."
FACT_FORMAT: Final = "tailrace.companion_format"
FACT_FAMILY: Final = "tailrace.family"
FACT_STREAM_ID: Final = "tailrace.stream_id"
FACT_FIRST: Final = "tailrace.first"  # first and last entry the file covers, whether it has rows or not
FACT_LAST: Final = "tailrace.last"
FACT_ROWS: Final = "tailrace.rows"  # number of entries in that range
FACT_PLAN_HASH: Final = "tailrace.plan_hash"
FACT_WRITER: Final = "tailrace.writer"

# Checksums of a Parquet file, so that a part of it can be trusted without the rest.
FACT_BLOCK_BYTES: Final = "tailrace.block_bytes"
FACT_BLOCK_XXH3: Final = "tailrace.block_xxh3"  # 16 digits for each block, the last of which may be shorter
FACT_CHECKED_BYTES: Final = "tailrace.checked_bytes"  # from the beginning to the end of the last block
FACT_INDEX_XXH3: Final = "tailrace.index_xxh3"  # of what lies between the row groups and the footer
FACT_FOOTER_XXH3: Final = "tailrace.footer_xxh3"  # of the footer to the end, with zeros in place of this
BLOCK_BYTES: Final = 64 << 10

# -- routing_key_index: one row for each key, sorted by (key_hash, key)

KEY: Final = "key"  # binary
KEY_HASH: Final = "key_hash"  # int64: `key_hash()` below
FIRST_ENTRY: Final = "first_entry"  # int64: the first and the last entry with this key
LAST_ENTRY: Final = "last_entry"
ENTRY_COUNT: Final = "entry_count"  # int64
# Two lists of int64 of one length: a span from first to last for each row group of a segment with the key.
# Spans ascend and do not overlap. They are entries and not row groups, so compaction leaves them valid.
SPAN_FIRSTS: Final = "span_firsts"
SPAN_LASTS: Final = "span_lasts"

# -- routing_key_lexicon: key, first_entry, last_entry; sorted by key

# -- exact: sorted by (field, value with null first, entries[0]); a row group has rows of one field only

FIELD: Final = "field"  # string
VALUE: Final = "value"  # binary: `encode_value()`; null: entries with any value
ENTRIES: Final = "entries"  # list of int64, ascending, never empty; very long lists continue in the next row
LIST_ENTRIES_MAX: Final = 65_536
VALUE_BYTES_MAX: Final = 1024  # of a string that is stored whole

# -- col: one row for each entry, sorted by entry; a list column for each field, under the field's name

ENTRY: Final = "_entry"  # int64; names of fields never begin with an underscore

# -- fts: a zip, stored, not deflated

SPLIT_FACTS: Final = "split.json"
SPLIT_TERMS: Final = "terms.parquet"
# terms.parquet: FIELD, TERM, DOCUMENTS, ENTRIES, FREQUENCIES, POSITIONS; sorted by (field, term, entries[0])
TERM: Final = "term"  # string; null: entries with any value, and FREQUENCIES are their counts of tokens
DOCUMENTS: Final = "documents"  # int64: in how many entries; of the whole term also where a list continues
FREQUENCIES: Final = "frequencies"  # list of int32: how often in each of these entries
# List of int32: token positions, as many as the sum of frequencies; empty if the field has no positions.
# The tokens of a record are counted from 0, with a gap of one between two of its values.
POSITIONS: Final = "positions"
KEYWORD_BYTES_MAX: Final = 1024  # of a keyword in the table; longer ones are cut as tokens are

# -- agg: one row for each (rollup, interval_ms, window_start, dimensions, measure), in this order

ROLLUP: Final = "rollup"  # string: its name, or `partial_rollup_name()` for rows by fewer dimensions
INTERVAL_MS: Final = "interval_ms"  # int64
WINDOW_START: Final = "window_start"  # int64, ms
DIMENSIONS: Final = "dimensions"  # list of string or null, in the order of the rollup
PARTIAL_ROLLUP_VERSION: Final = 1  # stored partial rollups: by no dimension, and by each single one
MEASURE: Final = "measure"  # string
COUNT: Final = "count"  # int64
SUM: Final = "sum"  # double, the nearest one. Null if the measure is a count, as all columns below
SUM_REST: Final = "sum_rest"  # double: with it the sum is exact, unless SUM_EXACT is there
SUM_EXACT: Final = "sum_exact"  # binary: `encode_sum()`; null where two doubles are enough
MIN: Final = "min"  # double; null if there is none
MAX: Final = "max"
MIN_WHOLE: Final = "min_whole"  # int64: the number itself if it is an integer; else null
MAX_WHOLE: Final = "max_whole"
HISTOGRAM: Final = "histogram"  # map of int32 exponent to int64 count; null if there is none
UNPLACED: Final = "unplaced"  # int64: numbers in the histogram of which only the mean is known
SKETCH: Final = "sketch"  # map of int32 to int64: counts by code, ascending


def partial_rollup_name(rollup: str, places: Sequence[int]) -> str:
    """The stored name of a rollup by fewer dimensions. No rollup can have such a name."""
    return f"{rollup}/{','.join(map(str, places))}"


# -- mblk: one row for each entry, sorted by (metric, windowStart, _entry), nulls last

MBLK_TEXTS: Final = (
    "metric",
    "unit",
    "metricKind",
    "temporality",
    "instance",
    "stream",
    "dimensionKey",
    "seriesKey",
)
MBLK_DIMENSION_PAIRS: Final = "dimensionPairs"  # list of string
MBLK_TIMES: Final = ("windowStart", "windowEnd", "intervalMs")  # int64
# Then COUNT (null if the record has no summary), SUM, SUM_WHOLE, MIN, MIN_WHOLE, MAX, MAX_WHOLE,
# HISTOGRAM and SKETCH, the latter as binary.
SUM_WHOLE: Final = "sum_whole"
# Where the numbers of a row come from. A rollup with other pointers cannot use this family.
MBLK_POINTERS: Final = ("/count", "/sum", "/min", "/max", "/buckets", "/sketch")

_SIGN: Final = 1 << 63
_ALL: Final = (1 << 64) - 1
_WORD: Final = struct.Struct(">Q")
_DOUBLE: Final = struct.Struct(">d")
_SHIFT: Final = struct.Struct(">H")


def index_file_key(plan_hash: str, family: str, first: int, last: int, sha256: str) -> str:
    """The key of an index file in its stream's folder. The plan hash may have the prefix `sha256:`."""
    plan = plan_hash.removeprefix("sha256:")[:16]
    return f"companions/{plan}/{family}/{first:020}-{last:020}.{sha256[:16]}.{EXTENSIONS[family]}"


unsigned_key_hash: Final[Callable[[bytes], int]] = xxhash.xxh3_64_intdigest  # `key_hash` has the same bits


def key_hash(key: bytes) -> int:
    """XXH3-64 as a signed integer, as Parquet and Spark compare it."""
    hashed = unsigned_key_hash(key)
    return hashed - (1 << 64) if hashed & _SIGN else hashed


def encode_value(value: Value) -> bytes:
    """A canonical value as bytes that compare as the values do.

    Strings are UTF-8. Of one with more than 1024 bytes the first 1024 and the XXH3-128 of the whole are
    stored: a match of such a value has to be verified on the record. Integers and dates are 8 bytes with the
    sign bit inverted, floats likewise, booleans one byte.
    """
    if isinstance(value, str):
        encoded = value.encode()
        if len(encoded) <= VALUE_BYTES_MAX:
            return encoded
        return encoded[:VALUE_BYTES_MAX] + xxhash.xxh3_128_digest(encoded)
    if isinstance(value, bool):
        return b"\1" if value else b"\0"
    if isinstance(value, int):
        return _WORD.pack(value + _SIGN)
    (bits,) = _WORD.unpack(_DOUBLE.pack(value))
    return _WORD.pack(bits ^ (_ALL if bits & _SIGN else _SIGN))


def is_truncated(stored: bytes) -> bool:
    """Whether the stored bytes are those of a truncated string."""
    return len(stored) > VALUE_BYTES_MAX


def decode_value(stored: bytes, kind: str) -> Value:
    """The value of stored bytes by the kind of its field; not for truncated strings."""
    if kind in ("keyword", "text"):
        return stored.decode()
    if kind == "bool":
        return stored == b"\1"
    (bits,) = _WORD.unpack(stored)
    if kind != "float":
        return bits - _SIGN
    return _DOUBLE.unpack(_WORD.pack(bits ^ (_SIGN if bits & _SIGN else _ALL)))[0]


def encode_sum(total: int) -> bytes:
    """Encode an exact sum, an integer multiple of 2 ** -1074.

    Two bytes with the number of trailing zero bits, big-endian, then the rest as the shortest two's
    complement, big-endian. Zero is empty.
    """
    if not total:
        return b""
    zeros = (total & -total).bit_length() - 1
    rest = total >> zeros
    return _SHIFT.pack(zeros) + rest.to_bytes(rest.bit_length() // 8 + 1, "big", signed=True)


def decode_sum(stored: bytes) -> int:
    if not stored:
        return 0
    (zeros,) = _SHIFT.unpack_from(stored)
    return int.from_bytes(stored[2:], "big", signed=True) << zeros
