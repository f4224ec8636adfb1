"""One pass over a segment that builds all the families somebody wants of it."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.schema.search_config import SearchConfig
from tailrace.search.index_files.format import (
    AGG,
    COL,
    EXACT,
    FTS,
    MBLK,
    ROUTING_KEY_INDEX,
    ROUTING_KEY_LEXICON,
)
from tailrace.search.index_files.index_plan import BuildPlan
from tailrace.search.records import RecordView
from tailrace.spark.index import mblk
from tailrace.spark.index.agg import AggregateBuilder
from tailrace.spark.index.batch import (
    SegmentBatch,
    SegmentReader,
    iter_row_group_runs,
    open_segment,
    read_rows,
)
from tailrace.spark.index.col import ColumnBuilder
from tailrace.spark.index.exact import ExactBuilder
from tailrace.spark.index.fts import FullTextBuilder
from tailrace.spark.index.keys import RoutingKeyBuilder
from tailrace.spark.index.mblk import MetricBlockBuilder
from tailrace.spark.index.parquet import BuiltIndexFile, IndexedRange
from tailrace.storage.segments.model import CorruptSegmentError
from tailrace.storage.segments.parquet import pa, pq

TASK_MEMORY_BYTES: Final = 400 << 20

_KEY_FAMILIES: Final = frozenset({ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON})
_EXACT_MEMORY_DIVISOR: Final = 4  # of the budget


class IndexFileBuilder(Protocol):
    """One family, or two that are made of the same."""

    def add(self, batch: SegmentBatch) -> None: ...

    def finish(self) -> list[BuiltIndexFile]: ...


class BuildRequest(NamedTuple):
    """What is to be built of one segment."""

    stream_id: str
    first: int
    last: int
    rows: int
    sha256: str
    families: frozenset[str]
    plan: BuildPlan
    directory: Path  # for runs and indexes in the making
    memory_bytes: int = TASK_MEMORY_BYTES
    reference: bool = False  # every value by the reference function


class UnusablePlanError(Exception):
    """The plan asks for something that cannot be: an include that is no query any more. Quotes no data."""


StepCallback = Callable[[str], None]


def build_segment(
    raw: bytes, request: BuildRequest, step: StepCallback = lambda _name: None
) -> list[BuiltIndexFile]:
    """The files of a segment. CorruptSegmentError if it is not what was recorded, or cannot be read;
    UnusablePlanError if nothing can be built by the plan.
    """
    if hashlib.sha256(raw).hexdigest() != request.sha256:
        raise CorruptSegmentError("the segment does not have its SHA-256")
    try:
        builders, reader = create_builders(request)
    except TailraceError as refusal:
        raise UnusablePlanError(refusal.message) from refusal
    with gc_disabled():
        rows = 0
        for batch in read_batches(raw, reader):
            for builder in builders:
                builder.add(batch)
            if not rows:
                step("mid_build")
            rows += batch.count
        if rows != request.rows:
            raise CorruptSegmentError(f"the segment has {rows} rows, not {request.rows}")
        return [built for builder in builders for built in builder.finish()]


@contextmanager
def gc_disabled() -> Generator[None]:
    """Records never refer to themselves: looking for that over and over, with thousands held, costs much."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def read_batches(raw: bytes, reader: SegmentReader | None) -> Iterator[SegmentBatch]:
    """A few row groups at a time; without a reader only entries and keys."""
    try:
        file = open_segment(raw)
        waiting = list(iter_row_group_runs(file))
    except (pa.ArrowException, OSError) as error:
        raise CorruptSegmentError(f"the segment cannot be opened: {error}") from error
    for turn in waiting:
        try:
            rows = read_rows(file, turn, payloads=reader is not None)
        except (pa.ArrowException, OSError) as error:
            raise CorruptSegmentError(f"the segment cannot be decoded: {error}") from error
        yield SegmentBatch(rows, None) if reader is None else reader.batch(rows)


def create_builders(request: BuildRequest) -> tuple[list[IndexFileBuilder], SegmentReader | None]:
    """Whoever builds something, and what reads the segment for them."""
    covers = IndexedRange(
        request.stream_id, request.first, request.last, request.rows, request.plan.plan.hash
    )
    wanted, members = request.families, request.plan.members
    builders: list[IndexFileBuilder] = []
    if wanted & _KEY_FAMILIES:
        builders.append(RoutingKeyBuilder(covers, wanted))
    if not wanted - _KEY_FAMILIES:
        return builders, None
    view = _search_view(request.plan)
    config, fields, pointers = view.config, set[str](), list[tuple[str, ...]]()
    if EXACT in wanted:
        names = members[EXACT]
        share = request.memory_bytes // _EXACT_MEMORY_DIVISOR
        builders.append(ExactBuilder(covers, config, names, share, request.directory))
        fields.update(names)
    if COL in wanted:
        names = column_fields(members[COL], view.primary)
        builders.append(ColumnBuilder(covers, config, names, view.primary))
        fields.update(names)
    if FTS in wanted:
        builders.append(FullTextBuilder(covers, config, members[FTS]))
        fields.update(members[FTS])
    if AGG in wanted:
        agg = AggregateBuilder(covers, config, members[AGG])
        builders.append(agg)
        fields |= agg.fields()
        pointers += agg.pointers()
    if MBLK in wanted:
        builders.append(MetricBlockBuilder(covers))
        pointers += mblk.METRIC_BLOCK_POINTERS
    return builders, SegmentReader(view, sorted(fields), pointers, reference=request.reference)


def column_fields(names: Iterable[str], primary: str | None) -> list[str]:
    """The columns of `col`: its fields, and the time that searches are sorted by."""
    return sorted({*names, *([] if primary is None else [primary])})


def _search_view(plan: BuildPlan) -> RecordView:
    """Records without a search configuration have no fields, but may still be metrics."""
    if plan.view is not None:
        return plan.view
    return RecordView(msgspec.structs.replace(plan.registry, search=SearchConfig(fields={})))


def verify_built_file(built: BuiltIndexFile) -> None:
    """Opens a Parquet file that was just made: its footer and rows are as they should be."""
    if built.family != FTS:
        verify_index_file(built.family, built.data, built.rows)


def verify_index_file(family: str, data: bytes | memoryview, rows: int) -> None:
    """The same of a file that may not be in memory as a whole."""
    file: Any = pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)))
    facts = file.metadata.metadata
    assert facts[b"tailrace.family"] == family.encode(), "the footer tells another family"
    assert family not in (COL, MBLK) or file.metadata.num_rows == rows, "a row for each entry"
