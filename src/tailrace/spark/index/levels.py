"""Groups of a rollup, each of which is made of smaller ones where these are there already.

Members are grouped once, by all dimensions and the shortest interval. Longer intervals, and fewer dimensions,
only put together what that gave: nothing is looked at member by member again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tailrace.search.aggregates.summary_arrays import (
    PartialSummaries,
    SummaryArray,
    concat_partial_summaries,
    concat_summaries,
    sum_counts,
)
from tailrace.spark.index.arrays import np

_DENSE_FACTOR: Final = 8  # so many marks for each member are quicker than sorting


class MemberGroups(NamedTuple):
    """Members by group; groups are numbered as what they were made of ascends."""

    of: Any
    number: int  # of groups
    members: Any  # one of each group


def group_members(ids: Any) -> MemberGroups:
    """Members with one number are one group; there are some."""
    low = int(ids.min())
    width = int(ids.max()) - low + 1
    if width <= _DENSE_FACTOR * len(ids):
        marks = np.zeros(width, bool)
        marks[ids - low] = True
        of = (np.cumsum(marks) - 1)[ids - low]
    else:
        of = np.unique(ids, return_inverse=True)[1]
    members = np.empty(int(of.max()) + 1, np.int64)
    members[of] = np.arange(len(ids))
    return MemberGroups(of, len(members), members)


class RollupLevel(NamedTuple):
    """The groups by one interval and some dimensions."""

    span_ms: int
    members: Any  # one of each group
    found: list[Any]  # by measure: counts, tallies, or summaries of which nothing else is made

    @property
    def number(self) -> int:
        return len(self.members)

    def is_part_of(self, span_ms: int) -> bool:
        """Whether groups by a longer interval can be made of these."""
        additive = all(isinstance(found, PartialSummaries | np.ndarray) for found in self.found)
        return additive and span_ms % self.span_ms == 0


def build_level(
    span_ms: int,
    ids: Callable[[Any], Any],
    smaller: Sequence[RollupLevel],
    states: Callable[[MemberGroups], list[Any]],
) -> RollupLevel:
    """The groups of members with one id, which is asked for at some places.

    The last of the smaller levels that will do is put together.
    """
    for level in reversed(smaller):
        if level.is_part_of(span_ms):
            groups = group_members(ids(level.members))
            found = [_combine_states(one, groups) for one in level.found]
            return RollupLevel(span_ms, level.members[groups.members], found)
    groups = group_members(ids(slice(None)))
    return RollupLevel(span_ms, groups.members, states(groups))


def _combine_states(found: Any, groups: MemberGroups) -> Any:
    if isinstance(found, PartialSummaries):
        return found.by(groups.of, groups.number)
    return sum_counts(found, groups.of, groups.number)


def join_states(levels: Sequence[RollupLevel]) -> list[Any]:
    """Counts and summaries by measure, as they are stored, one level behind the other."""
    return [
        _to_summaries(_join_parts(parts)) for parts in zip(*(level.found for level in levels), strict=True)
    ]


def _join_parts(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], PartialSummaries):
        return concat_partial_summaries(parts)
    return concat_summaries(parts) if isinstance(parts[0], SummaryArray) else np.concatenate(parts)


def _to_summaries(found: Any) -> Any:
    return found.summaries() if isinstance(found, PartialSummaries) else found
