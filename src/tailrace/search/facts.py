"""What a scan learns about a stretch besides its matches, kept so that the next scan can decode less."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from tailrace.search.bind import BoundQuery
from tailrace.search.index_files.wants import is_outside_times
from tailrace.search.plan import ScanRange
from tailrace.search.score import Statistics
from tailrace.search.view import RecordView

RANGES_CACHED_MAX = 4096
TOKENS_PER_RANGE_MAX = 64  # counted in one stretch


class RangeStatistics:
    """Of one stretch: how far its primary timestamps reach, and counts of its texts."""

    __slots__ = ("_fields", "_tokens", "has_primary", "primary_max", "primary_min")

    def __init__(self) -> None:
        self.has_primary = False
        self.primary_max: int | None = None
        self.primary_min: int | None = None
        self._fields: dict[str, tuple[int, int]] = {}
        self._tokens: dict[tuple[str, str], int] = {}

    def answers(self, wanted: Mapping[str, set[str]], primary: str | None) -> bool:
        if primary is not None and not self.has_primary:
            return False
        return all(
            name in self._fields and all((name, token) in self._tokens for token in tokens)
            for name, tokens in wanted.items()
        )

    def rules_out(self, query: BoundQuery, primary: str | None) -> bool:
        """Whether no row can match, by the times alone."""
        if primary is None or self.primary_max is None or self.primary_min is None:
            return False
        return is_outside_times(query, primary, (self.primary_min, self.primary_max))

    def learn(self, statistics: Statistics, primary_max: int | None, primary_min: int | None = None) -> None:
        """Counts of the whole stretch, and of nothing else."""
        self.has_primary = True
        self.primary_max = primary_max
        self.primary_min = primary_min
        for name, field in statistics.items():
            self._fields[name] = (field.documents, field.tokens)
            for token, count in field.with_token.items():
                if len(self._tokens) >= TOKENS_PER_RANGE_MAX:
                    self._tokens.clear()
                self._tokens[name, token] = count

    def add_to(self, statistics: Statistics) -> None:
        for name, field in statistics.items():
            documents, tokens = self._fields[name]
            field.add(documents, tokens, {token: self._tokens[name, token] for token in field.with_token})


class RangeStatisticsCache:
    """By stream and stretch, the least recently used out first. Entries never change, registries do."""

    def __init__(self) -> None:
        self._facts: OrderedDict[tuple[int, int], tuple[RecordView, RangeStatistics]] = OrderedDict()

    def find(self, number: int, stretch: ScanRange, view: RecordView) -> RangeStatistics | None:
        kept = self._facts.get((number, stretch.first))
        if kept is None or not kept[0].same_values(view):
            return None
        self._facts.move_to_end((number, stretch.first))
        return kept[1]

    def put(self, number: int, stretch: ScanRange, view: RecordView, facts: RangeStatistics) -> None:
        self._facts[number, stretch.first] = (view, facts)
        self._facts.move_to_end((number, stretch.first))
        while len(self._facts) > RANGES_CACHED_MAX:
            self._facts.popitem(last=False)
