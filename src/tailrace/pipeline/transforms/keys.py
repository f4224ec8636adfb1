"""Runs of keys become one run: each key once, with everything that all runs know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tailrace.query.family_format import (
    ENTRY_COUNT,
    FIRST_ENTRY,
    KEY,
    KEY_HASH,
    LAST_ENTRY,
    SPAN_FIRSTS,
    SPAN_LASTS,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

INDEX_DDL: Final = (
    f"{KEY_HASH} bigint, {KEY} binary, {FIRST_ENTRY} bigint, {LAST_ENTRY} bigint, {ENTRY_COUNT} bigint, "
    f"{SPAN_FIRSTS} array<bigint>, {SPAN_LASTS} array<bigint>"
)
INDEX_ORDER: Final = (KEY_HASH, KEY)
LEXICON_DDL: Final = f"{KEY} binary, {FIRST_ENTRY} bigint, {LAST_ENTRY} bigint"
LEXICON_ORDER: Final = (KEY,)


def merge_key_runs(runs: DataFrame) -> DataFrame:
    """Spans of runs do not overlap, so that sorting the firsts and the lasts each keeps them together."""
    from pyspark.sql import functions as f

    return runs.groupBy(KEY_HASH, KEY).agg(
        f.min(FIRST_ENTRY).alias(FIRST_ENTRY),
        f.max(LAST_ENTRY).alias(LAST_ENTRY),
        f.sum(ENTRY_COUNT).alias(ENTRY_COUNT),
        _joined(SPAN_FIRSTS),
        _joined(SPAN_LASTS),
    )


def merge_lexicon(runs: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return runs.groupBy(KEY).agg(f.min(FIRST_ENTRY).alias(FIRST_ENTRY), f.max(LAST_ENTRY).alias(LAST_ENTRY))


def from_entry(runs: DataFrame, earliest: int) -> DataFrame:
    """Without the keys of which retention has taken every entry."""
    from pyspark.sql import functions as f

    return runs.where(f.col(LAST_ENTRY) >= earliest)


def _joined(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.sort_array(f.flatten(f.collect_list(name))).alias(name)
