"""The part of an aggregate that is arrays: what companions give, as far as numbers and counts are asked for.

Everything else of the answer, from records and from the tail, is in `Groups`. Both come together at the end:
groups that are in both become objects, and all of them are shown in one order.
"""

from __future__ import annotations

import time
from typing import cast

from tailrace.search.aggregate_request import AggregateRequest
from tailrace.search.aggregates.agg_states import SummaryMeasure, add_rollup_file
from tailrace.search.aggregates.aggregate import Groups, aggregate_timeout, check_bytes, check_groups
from tailrace.search.aggregates.body import encode_windows
from tailrace.search.aggregates.keyed import DimensionValues, KeyedStates
from tailrace.search.aggregates.span_states import ROWS_AT_ONCE, SpanRows, build_piece, read_span_rows
from tailrace.search.index_files.agg_file import RollupFile, RollupSelection
from tailrace.search.index_files.source import SpanSource
from tailrace.search.view import RecordView


class ArrayStates:
    """Of one aggregate, whose measures are counts and summaries of fields."""

    def __init__(self, view: RecordView, request: AggregateRequest, deadline: float) -> None:
        self._request = request
        self._deadline = deadline
        measures = request.measures.items()
        self._counted = [name for name, measure in measures if measure.kind == "count"]
        self._measured = [
            SummaryMeasure(
                name,
                view.config.fields[cast("str", measure.field)].kind == "integer",
                measure.histogram is not None,
            )
            for name, measure in measures
            if measure.kind == "summary"
        ]
        self._states = KeyedStates([DimensionValues() for _ in request.group_by])
        self._waiting: list[SpanRows] = []  # of spans, until there are enough of them

    def add_file(self, file: RollupFile, wanted: RollupSelection) -> int:
        """Adds whole windows of a rollup, all or nothing; answers how many states that were."""
        found = add_rollup_file(
            file, wanted, self._counted, self._measured, self._states, self._look_at_clock
        )
        self._check()
        return found

    def add_span(self, source: SpanSource, request: AggregateRequest) -> None:
        """Adds the rows of a span that lie in the time of a request, all or nothing."""
        found = self._states.fresh()
        waiting: list[SpanRows] = []
        for rows in read_span_rows(source, request, self._counted, self._measured, self._states.texts):
            self._look_at_clock()
            if waiting:  # so many in one span that they need not wait for those of others
                found.add(build_piece(waiting, self._measured))
            waiting = [rows]
        self._states.absorb(found)
        self._waiting += waiting
        if sum(rows.size for rows in self._waiting) > ROWS_AT_ONCE:
            self._add_waiting()
        self._check()

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._states.add(build_piece(waiting, self._measured))

    def _look_at_clock(self) -> None:
        if time.monotonic() >= self._deadline:
            raise aggregate_timeout()

    def _check(self) -> None:
        self._states.check(check_groups, check_bytes)

    def shown(self, groups: Groups) -> list[bytes | memoryview]:
        """All windows as JSON, with those groups that were made elsewhere; a text in pieces."""
        self._add_waiting()
        states = self._states
        states.settle()
        for keys, piece in states.take_out(groups.groups):
            for row, key in enumerate(keys):
                group = groups.at(key)
                for index, name in enumerate(groups.counted):
                    group.counts[index] += int(piece.counts[name][row])
                for name, found in piece.summaries.items():
                    groups.merge(key, name, found.summary(row))
        groups.settle()
        check_groups(states.rows + len(groups.groups))
        others = groups.shown_each()
        groups.groups.clear()
        request = self._request
        return encode_windows(states, request.group_by, request.interval_ms, others, self._look_at_clock)
