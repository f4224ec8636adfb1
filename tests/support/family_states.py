"""One stream in any state, with companions that come and go: built under one plan or another, for some
segments or all, taken off the list, damaged or lost.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from support.aggregate_model import rollup_view
from support.families import FamilyStore
from support.queries import Question
from support.query_states import QueryStates, aggregates, filters
from support.search_model import registry_of
from support.search_states import batches, queries
from tailrace.schema.registry import Registry, RoutingKey
from tailrace.search.index_files.catalogue import IndexCatalogue, RoutingKeyIndex
from tailrace.search.index_files.format import COL, EXACT, FAMILIES, FTS

subsets = st.one_of(
    st.just(FAMILIES), st.just((COL, EXACT, FTS)), st.lists(st.sampled_from(FAMILIES), unique=True)
)
kinds = st.sampled_from(
    [
        *("append", "append", "seal", "build", "build", "build", "merge"),
        *("unlist", "damage", "evolve", "trim", "restart"),
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
    if kind in ("unlist", "damage"):
        return kind, draw(st.integers(0, 20)), draw(st.booleans())
    return (kind,)


class FamilyStates(QueryStates):
    """As its base, and companions come and go."""

    families: FamilyStore
    catalogue: IndexCatalogue | None = None

    def open_searcher(self, budget: int) -> None:
        super().open_searcher(budget)
        if self.catalogue is None:
            self.families = FamilyStore(self.real, self.directory / "objects")
        self.catalogue = self.searcher.catalogue = self.real.call(self.families.catalogue)
        self.lexicons = RoutingKeyIndex(self.catalogue)
        self.real.log.reader.history.use_key_index(self.lexicons)

    def close_searcher(self) -> None:
        super().close_searcher()
        self.families.close()

    @initialize(
        budget=st.sampled_from([0, 0, 1 << 30]),
        rows=st.sampled_from([2, 16]),
        total=st.sampled_from([3, 10_000]),
        older=st.lists(batches, min_size=1, max_size=3),
        families=subsets,
    )
    def begin(self, budget: int, rows: int, total: int, older: list[Any], families: Any) -> None:
        """Some segments with companions to begin with: else histories are over before there are any."""
        super().create(budget, rows, total)
        for batch in older:
            self.append(batch, True)
            self.build(families, newest_only=True, before=False, with_rollups=False)

    def create(self, budget: int, rows: int, total: int) -> None:
        """`begin` takes its place."""

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

    # -- actions -----------------------------------------------------------------------------------------

    def append(self, batch: list[Any], ascii_only: bool) -> None:
        """Every object has the member that version 2 moves: registries are only installed if that is so."""
        moved = [{"id": None, **record} if isinstance(record, dict) else record for record in batch]
        super().append(moved, ascii_only)

    def seal(self) -> None:
        """What is in memory goes into a segment, and the hot store hears of it."""
        self.store(True)
        self.store(False)

    def registry(self, before: bool, with_rollups: bool) -> Registry:
        evolved_at = None if before else self.evolved_at
        registry = rollup_view(evolved_at).registry if with_rollups else registry_of(evolved_at)
        return msgspec.structs.replace(registry, routing_key=RoutingKey("/key", False))

    def build(self, families: Any, newest_only: bool, before: bool, with_rollups: bool) -> None:
        """Some families of the newest segment, or of all, by the plan of now or of before the evolution."""
        self.seal()
        stream = self.stream
        infos = [info for info in self.segments_of(stream.number) if info.last > stream.earliest]
        for info in infos[-1:] if newest_only else infos:
            boundary = self.evolved_at
            if before and boundary is not None and info.last > boundary:
                continue  # nobody builds by a plan that does not know the version of an entry
            self.families.build(stream, info, self.registry(before, with_rollups), families)

    def merge(self) -> None:
        for index_file in self.families.index_files:
            if not self.families.exists(self.stream, index_file):
                return
        self.families.merge_splits(self.stream, 2)

    def unlist(self, place: int, all_of_it: bool) -> None:
        listed = self.families.index_files
        if listed:
            chosen = listed[place % len(listed)]
            self.families.drop(lambda one: one is chosen or (all_of_it and one.family == chosen.family))

    def damage(self, place: int, remove: bool) -> None:
        """Also what is open is let go, so that the file is read again."""
        listed = self.families.index_files
        if listed and self.catalogue is not None:
            self.families.damage(self.stream, listed[place % len(listed)], remove=remove)
            self.catalogue.files.evict_all()
