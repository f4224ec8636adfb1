"""What a search used is gone when it is over: no file waits for somebody to look for cycles."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest

from support.aggregate_model import rollup_view
from support.companions import Stored, build, plan_of
from support.queries import payload_of
from support.search_model import registry_of
from tailrace.search.collector import HitCollector
from tailrace.search.index_files.file_cache import LoadedContent
from tailrace.search.index_files.parquet_file import ParquetFile
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchParameters, bind_search
from tailrace.search.scan import Scanner


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_collector_is_gone_with_its_search() -> None:
    view = RecordView(registry_of(None))
    request = bind_search(SearchParameters("id:a", 10, None, None, None), view.config, 1000)
    scanner = Scanner(view, request)
    collector = HitCollector(view, request, scanner, scanner.new_statistics(), 100)
    for _, rows in scanner.scan([1], [payload_of({"id": "a"})], None, time.monotonic() + 60):
        assert rows is not None
        collector.add_scanned(rows)
    assert len(collector.top.hits) == 1
    left = weakref.ref(collector)
    del collector
    assert left() is None


def test_footers_of_closed_files_do_not_stay() -> None:
    rows = [Stored(entry, payload_of({"id": "x", "at": entry})) for entry in range(1, 9)]
    data = build(rows, plan_of(rollup_view().registry), families=["col"])["col"].data
    gc.collect()
    file = ParquetFile(LoadedContent(data))
    assert file.read(file.names[:1]).num_rows == 8
    del file
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, pq.FileMetaData | pq.ParquetSchema)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
