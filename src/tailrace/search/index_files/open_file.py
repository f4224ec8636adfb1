"""Takes a file apart, by its family."""

from __future__ import annotations

from tailrace.search.index_files import format as names
from tailrace.search.index_files.agg_file import AggFile
from tailrace.search.index_files.body import Body
from tailrace.search.index_files.col_file import ColFile
from tailrace.search.index_files.exact_file import ExactFile
from tailrace.search.index_files.fts_file import FtsFile
from tailrace.search.index_files.key_files import KeyIndexFile, LexiconFile
from tailrace.search.index_files.mblk_file import MblkFile
from tailrace.search.index_files.parquet_file import ParquetFile, check_facts
from tailrace.search.index_files.published import UnusableFileError
from tailrace.search.index_files.shelf import Opened
from tailrace.search.index_files.span import Served


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
