"""The metrics of the pipeline: read where they are counted, when somebody asks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from tailrace.common.server_metrics import ServerMetrics
from tailrace.log.model import Stream
from tailrace.log.records import Op, Published, Sealed
from tailrace.log.system_streams import has_index_files
from tailrace.server.pipeline_state import STATES

if TYPE_CHECKING:
    from tailrace.server.pipeline import PipelineRoutes

REMEMBERED_MAX: Final = 65_536


class CompanionWaitTimer:
    """How long segments wait for their companions. Those from before the start are not counted."""

    def __init__(self, telemetry: ServerMetrics) -> None:
        self._telemetry = telemetry
        self._sealed: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def changed(self, op: Op, stream: Stream) -> None:
        if isinstance(op, Sealed) and has_index_files(stream.name):
            for info in op.segments:
                self._sealed[stream.number, info.first] = (info.last, op.at_ns)
                if len(self._sealed) > REMEMBERED_MAX:
                    self._sealed.popitem(last=False)
        elif isinstance(op, Published):
            for first in {one.first for one in op.added if not one.level}:
                found = self._sealed.pop((stream.number, first), None)
                if found is not None:
                    waited_s = max(0, op.at_ns - found[1]) / 1e9
                    self._telemetry.pipeline_seal_to_published_seconds.observe(waited_s)


def connect_pipeline_metrics(telemetry: ServerMetrics, routes: PipelineRoutes) -> None:
    state, publishing = routes.state, routes.publishing

    def outcomes() -> Iterable[tuple[list[str], float]]:
        return [([job, outcome], count) for (job, outcome), count in sorted(publishing.outcomes.items())]

    for name in STATES:
        telemetry.pipeline_state.reads[(name,)] = lambda name=name: float(state.shown == name)
    telemetry.pipeline_restarts.read = lambda: state.restarts
    telemetry.pipeline_backlog_segments.read = lambda: state.backlog()[0]
    telemetry.pipeline_backlog_oldest_seconds.read = lambda: state.backlog()[2] / 1000
    telemetry.pipeline_publish.each = outcomes
    telemetry.pipeline_rows.reads[("companions",)] = lambda: publishing.rows
    telemetry.pipeline_rows.reads[("compact",)] = lambda: publishing.compacting.rows
    telemetry.compacted_segments.read = lambda: publishing.compacting.segments
    telemetry.pipeline_rss_bytes.read = lambda: float(
        _parse_int(None if state.beat is None else state.beat.rss_bytes)
    )
    telemetry.pipeline_quarantined_segments.read = lambda: state.given_up


def _parse_int(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 18 else 0
