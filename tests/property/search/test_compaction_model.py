"""Compaction changes no answer: for any history with segments that become one, searches, filtered and keyed
reads, aggregates and the listing of keys are what the records say. The old objects are deleted at once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from support.family_states import FamilyStates, subsets
from support.queries import Question
from support.query_states import aggregates, filters
from support.search_states import batches, configured, queries
from tailrace.log.segment_catalogue import read_segments
from tailrace.storage.segments.model import SegmentInfo

kinds = st.sampled_from(
    [
        *("append", "append", "seal", "build", "build", "merge", "compact", "compact", "compact", "store"),
        *("evolve", "trim", "restart"),
    ]
)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Any, ...]:
    """An action and what it needs."""
    kind = draw(kinds)
    if kind == "append":
        return kind, draw(batches), draw(st.booleans())
    if kind == "build":
        return kind, draw(subsets), draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    if kind == "compact":
        return kind, draw(st.integers(0, 5)), draw(st.integers(2, 5))
    return (kind, draw(st.booleans())) if kind == "store" else (kind,)


class CompactStates(FamilyStates):
    """As its base, and segments become one."""

    histories: ClassVar[int] = 0
    joined: ClassVar[int] = 0  # histories in which segments became one
    compacted = 0

    @initialize(
        budget=st.sampled_from([0, 0, 1 << 30]),
        rows=st.sampled_from([2, 16]),
        total=st.sampled_from([3, 10_000]),
        older=st.lists(batches, min_size=2, max_size=4),
        families=subsets,
    )
    def begin(self, budget: int, rows: int, total: int, older: list[Any], families: Any) -> None:
        """The first segments become one at once: histories without that are those of the base."""
        super().begin(budget, rows, total, older, families)
        self.compact(0, len(older))

    def teardown(self) -> None:
        CompactStates.histories += 1
        CompactStates.joined += self.compacted > 0
        super().teardown()

    @rule(action=turns(), query=queries(), narrowed=filters, body=aggregates(), limit=st.integers(1, 4))
    def act(
        self,
        action: tuple[Any, ...],
        query: tuple[Any, ...],
        narrowed: tuple[Question, bytes | None, bool],
        body: dict[str, Any],
        limit: int,
    ) -> None:
        super().act(action, query, narrowed, body, limit)
        self.read_all()

    def segments_of(self, number: int) -> list[SegmentInfo]:
        log = self.real.log
        return read_segments(log.store, number, 0, tuple(log.streams.uncheckpointed.get(number, ())))

    def compact(self, place: int, count: int) -> None:
        """Some of the segments that are shown. None reaches across a version of the schema."""
        stream = self.stream
        infos = [info for info in self.segments_of(stream.number) if info.first > stream.earliest]
        place %= max(1, len(infos) - 1)
        run = infos[place : place + count]
        if len(run) < 2 or (self.evolved_at is not None and run[0].first <= self.evolved_at < run[-1].last):
            return
        before = (stream.cold.segments, stream.size_bytes, stream.sealed)
        joined = self.real.compact(stream, run)
        assert (joined.first, joined.last) == (run[0].first, run[-1].last)
        assert (stream.cold.segments + len(run) - 1, stream.size_bytes, stream.sealed) == before
        self.compacted += 1

    def build(self, families: Any, newest_only: bool, before: bool, with_rollups: bool) -> None:
        """Nothing is built for a segment of which something is built already for a part."""
        self.seal()
        infos = self.segments_of(self.stream.number)
        ranges = {(info.first, info.last) for info in infos}
        parts = [one for one in self.families.companions if (one.first, one.last) not in ranges]
        begin = infos[-1].first if newest_only and infos else 0
        if all(one.last < begin for one in parts):
            super().build(families, newest_only, before, with_rollups)

    def read_all(self) -> None:
        """Every entry that is shown, in pages of any size, and each of them by itself."""
        stream = self.stream
        for entries_max in (1, 3, 10_000):
            at, found = stream.earliest, list[bytes]()
            while at < stream.visible:
                page = self.real.read(stream, at, 1 << 20, entries_max, None, apart=True)
                assert page.next_entry > at
                found += [bytes(part) for part in page.parts]
                at = page.next_entry
            assert found == self.payloads[stream.earliest :]


def test_p8_p15_compaction_changes_no_answer() -> None:
    CompactStates.histories = CompactStates.joined = 0
    run_state_machine_as_test(CompactStates, settings=configured(24, 12))
    assert CompactStates.joined > 0.8 * CompactStates.histories


@pytest.mark.nightly
def test_p8_p15_compaction_changes_no_answer_at_length() -> None:
    run_state_machine_as_test(CompactStates, settings=configured(2000, 30))
