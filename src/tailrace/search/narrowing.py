"""Filtered reads through built indexes: which entries of a stream may match at all."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from tailrace.log.model import Stream
from tailrace.search.bind import BoundQuery
from tailrace.search.index_files.library import IndexCatalogue
from tailrace.search.index_files.published import UnusableFileError
from tailrace.search.index_files.span import IndexSpan
from tailrace.search.index_files.wants import FileSelection
from tailrace.search.packed import rows_from_bits
from tailrace.search.view import RecordView

CANDIDATE_GAP_MAX = 64  # entries between two candidates that are fetched in one go


class CandidateEntries(NamedTuple):
    """The entries of one stretch that may match; all others of it do not."""

    last: int
    entries: list[int]

    def next_run(self, after: int) -> tuple[int, int] | None:
        """The first and last entry to be looked at behind one; None if there is none here any more."""
        at = bisect_left(self.entries, after + 1)
        if at == len(self.entries):
            return None
        first = end = self.entries[at]
        for entry in self.entries[at + 1 :]:
            if entry - end > CANDIDATE_GAP_MAX:
                break
            end = entry
        return first, end


class IndexPrefilter:
    """One read with one filter. It remembers the span it is in."""

    def __init__(self, library: IndexCatalogue, stream: Stream, view: RecordView, query: BoundQuery) -> None:
        self._library = library
        self._stream = stream
        self._view = view
        self._query = query
        # Without a primary timestamp: nobody asks a filter how far times reach.
        self._wants = FileSelection(view, query, (), (), with_times=False)
        self._known: tuple[IndexSpan, CandidateEntries | None] | None = None

    async def at(self, entry: int) -> CandidateEntries | None:
        """What may match in the span that an entry lies in; None if nothing is known of it."""
        if self._known is not None and self._known[0].first <= entry <= self._known[0].last:
            return self._known[1]
        spans = await self._library.spans(self._stream, self._view.indexed)
        place = bisect_left(spans, entry, key=lambda span: span.last)
        if place == len(spans) or spans[place].first > entry:
            return None
        span = spans[place]
        self._known = (span, await self._judged(span))
        return self._known[1]

    async def _judged(self, span: IndexSpan) -> CandidateEntries | None:
        if self._wants.rules_out(span):
            return CandidateEntries(span.last, [])
        files = self._wants.files(span, self._stream.earliest)
        if files is None:
            return None
        opened = await self._library.opened(files)
        if len(opened) < len(files):
            return None

        def judged() -> CandidateEntries:
            from tailrace.search.index_files.source import SpanSource  # brings Arrow, which is large

            source = SpanSource(span, self._view.config, opened)
            return CandidateEntries(
                span.last, [source.entries[row] for row in rows_from_bits(source.judge(self._query).maybe)]
            )

        try:
            return await self._library.shelf.on_thread(judged)
        except UnusableFileError:
            return None
