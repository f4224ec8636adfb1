"""Takes a file apart, by its family."""

from __future__ import annotations

from tailrace.search.index_files import format as names
from tailrace.search.index_files.agg_file import RollupFile
from tailrace.search.index_files.body import FileContent
from tailrace.search.index_files.col_file import ColumnFile
from tailrace.search.index_files.exact_file import ExactFile
from tailrace.search.index_files.fts_file import FullTextFile
from tailrace.search.index_files.key_files import RoutingKeyIndexFile, RoutingKeyLexiconFile
from tailrace.search.index_files.mblk_file import MetricBlockFile
from tailrace.search.index_files.parquet_file import ParquetFile, check_metadata
from tailrace.search.index_files.published import UnusableFileError
from tailrace.search.index_files.shelf import OpenedFile
from tailrace.search.index_files.span import UsableFile


def open_index_file(served: UsableFile, body: FileContent) -> OpenedFile:
    """Runs on a thread."""
    companion, identity = served.companion, served.published.stream_id
    family, first, last = companion.family, companion.first, companion.last
    if family == names.FTS:
        return FullTextFile(body, identity, first, last)
    file = ParquetFile(body)
    check_metadata(file.facts, family, identity, first, last)
    if family == names.COL:
        return ColumnFile(file, first, last)
    if family == names.EXACT:
        return ExactFile(file)
    if family == names.AGG:
        return RollupFile(file)
    if family == names.MBLK:
        return MetricBlockFile(file)
    if family == names.ROUTING_KEY_INDEX:
        return RoutingKeyIndexFile(file)
    if family == names.ROUTING_KEY_LEXICON:
        return RoutingKeyLexiconFile(file)
    raise UnusableFileError(f"{family} is not read here")
