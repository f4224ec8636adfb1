"""Takes a file apart, by its family."""

from __future__ import annotations

from tailrace.query import family_format as names
from tailrace.query.families.agg_file import AggFile
from tailrace.query.families.body import Body
from tailrace.query.families.col_file import ColFile
from tailrace.query.families.exact_file import ExactFile
from tailrace.query.families.fts_file import FtsFile
from tailrace.query.families.key_files import KeyIndexFile, LexiconFile
from tailrace.query.families.mblk_file import MblkFile
from tailrace.query.families.parquet_file import ParquetFile, check_facts
from tailrace.query.families.published import UnusableFileError
from tailrace.query.families.shelf import Opened
from tailrace.query.families.span import Served


def open_file(served: Served, body: Body) -> Opened:
    """Runs on a thread."""
    companion, identity = served.companion, served.published.stream_id
    family, first, last = companion.family, companion.first, companion.last
    if family == names.FTS:
        return FtsFile(body, identity, first, last)
    file = ParquetFile(body)
    check_facts(file.facts, family, identity, first, last)
    if family == names.COL:
        return ColFile(file, first, last)
    if family == names.EXACT:
        return ExactFile(file)
    if family == names.AGG:
        return AggFile(file)
    if family == names.MBLK:
        return MblkFile(file)
    if family == names.ROUTING_KEY_INDEX:
        return KeyIndexFile(file)
    if family == names.ROUTING_KEY_LEXICON:
        return LexiconFile(file)
    raise UnusableFileError(f"{family} is not read here")
