"""Index coverage: segments without index files, due merges, stale files, and a summary. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from tailrace.log.segment_catalogue import IndexFileSet
from tailrace.storage.segments.index_files import IndexFile, PlanRecord, QuarantinedSegment
from tailrace.storage.segments.model import SegmentInfo

NEWEST_FIRST: Final = 8  # so many of the newest segments come before the old ones
MERGED_FAMILIES: Final = ("routing_key_index", "routing_key_lexicon", "exact", "agg", "fts")
FTS_ROWS_MAX: Final = 1_000_000
AGGREGATE_FAMILY: Final = "agg"

Range = tuple[int, int]


class UncoveredSegment(NamedTuple):
    """A segment and the families it has no index file of."""

    info: SegmentInfo
    families: tuple[str, ...]


class IndexMerge(NamedTuple):
    """Adjacent index files that are to be merged into one of the next level."""

    family: str
    level: int
    inputs: tuple[IndexFile, ...]

    @property
    def first(self) -> int:
        return self.inputs[0].first

    @property
    def last(self) -> int:
        return self.inputs[-1].last


class MergeRule(NamedTuple):
    """How many adjacent index files of a level make one of the next, and the highest level."""

    span: int  # of level 0
    fan_out: int  # of the others
    level_max: int


class Coverage:
    """The entries for which a stream has index files of each family of a plan."""

    def __init__(self, plan: PlanRecord, index_files: Iterable[IndexFile]) -> None:
        ranges: dict[str, list[Range]] = {family: [] for family in plan.families}
        for one in index_files:
            if plan.families.get(one.family) == one.fingerprint:
                ranges[one.family].append((one.first, one.last))
        self._runs = {family: merge_ranges(found) for family, found in ranges.items()}

    def covers(self, family: str, first: int, last: int) -> bool:
        runs = self._runs.get(family, [])
        index = bisect_right(runs, (first, 2**63)) - 1
        return index >= 0 and runs[index][1] >= last

    def missing(self, first: int, last: int) -> tuple[str, ...]:
        """Families of the plan that do not cover the range."""
        return tuple(family for family in self._runs if not self.covers(family, first, last))


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Ranges that touch or overlap as one, in order."""
    runs: list[Range] = []
    for first, last in sorted(ranges):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs


def uncovered_segments(
    segments: Sequence[SegmentInfo], coverage: Coverage, given_up: set[str]
) -> tuple[list[UncoveredSegment], list[SegmentInfo]]:
    """Segments without all of their index files, oldest first, and those of them that are quarantined."""
    found: list[UncoveredSegment] = []
    stuck: list[SegmentInfo] = []
    for info in segments:
        families = coverage.missing(info.first, info.last)
        if families and info.key in given_up:
            stuck.append(info)
        elif families:
            found.append(UncoveredSegment(info, families))
    return found, stuck


def build_order(found: list[UncoveredSegment]) -> list[UncoveredSegment]:
    """The newest few first, since recent entries are queried most; then from the oldest on."""
    newest = found[-NEWEST_FIRST:]
    return [*reversed(newest), *found[: len(found) - len(newest)]]


def stale_index_files(plan: PlanRecord, index_files: Iterable[IndexFile], coverage: Coverage) -> list[str]:
    """Objects of older plans that are no longer used: a newer one covers all their entries."""
    return [
        one.object
        for one in index_files
        if plan.families.get(one.family) != one.fingerprint
        and (one.family not in plan.families or coverage.covers(one.family, one.first, one.last))
    ]


def due_merges(
    plan: PlanRecord,
    index_files: Iterable[IndexFile],
    rule: MergeRule,
    part_of: Callable[[IndexFile], int | None] = lambda _: 0,
) -> list[IndexMerge]:
    """At most one merge of each family and level: the oldest that is due.

    Aggregates are merged only within the same `part_of` time; None: not at all.
    """
    found: list[IndexMerge] = []
    groups: dict[tuple[str, int, int], dict[Range, list[IndexFile]]] = {}
    for one in index_files:
        if one.family in MERGED_FAMILIES and plan.families.get(one.family) == one.fingerprint:
            part = part_of(one) if one.family == AGGREGATE_FAMILY else 0
            if part is None:
                continue
            group = groups.setdefault((one.family, one.level, part), {})
            group.setdefault((one.first, one.last), []).append(one)
    for (family, level, _), by_range in sorted(groups.items()):
        if level >= rule.level_max or any((one.family, one.level) == (family, level + 1) for one in found):
            continue
        wanted = rule.span if level == 0 else rule.fan_out
        inputs = _adjacent(by_range, wanted, FTS_ROWS_MAX if family == "fts" else None)
        if inputs:
            found.append(IndexMerge(family, level + 1, inputs))
    return found


def _adjacent(
    by_range: dict[Range, list[IndexFile]], wanted: int, rows_max: int | None
) -> tuple[IndexFile, ...]:
    """The first so many ranges that follow each other, with all files of each; nothing if there are fewer."""
    run: list[Range] = []
    rows = 0
    for entries in sorted(by_range):
        size = by_range[entries][0].rows
        if run and (entries[0] != run[-1][1] + 1 or (rows_max is not None and rows + size > rows_max)):
            run, rows = [], 0
        run.append(entries)
        rows += size
        if len(run) == wanted:
            return tuple(one for found in run for one in by_range[found])
    return ()


class FamilySummary(msgspec.Struct, frozen=True):
    """One family under the current plan. Files of older plans are counted only as stale."""

    covered: int = 0  # segments
    contiguous: int = 0  # of them, from the first segment on
    oldest_ns: int = 0  # last append time of the oldest segment that is not covered
    objects: int = 0
    bytes: int = 0
    stale_segments: int = 0
    stale_objects: int = 0
    updated_ns: int = 0  # when the newest was published


class IndexSummary(msgspec.Struct, frozen=True):
    segments: int = 0
    whole: int = 0  # segments with every family
    families: dict[str, FamilySummary] = {}
    stale_fields: frozenset[str] = frozenset()  # exact fields with data of another making
    quarantined: tuple[QuarantinedSegment, ...] = ()


EMPTY_SUMMARY = IndexSummary()


def summarise_index(
    plan: PlanRecord, segments: Sequence[SegmentInfo], known: IndexFileSet, coverage: Coverage
) -> IndexSummary:
    families = {
        family: _summarise_family(family, plan, segments, known, coverage) for family in plan.families
    }
    whole = sum(not coverage.missing(info.first, info.last) for info in segments)
    quarantined = tuple(one for one in known.quarantined if one.plan_hash == plan.hash)
    return IndexSummary(len(segments), whole, families, _stale_fields(plan, known), quarantined)


def _summarise_family(
    family: str,
    plan: PlanRecord,
    segments: Sequence[SegmentInfo],
    known: IndexFileSet,
    coverage: Coverage,
) -> FamilySummary:
    covered = contiguous = oldest_ns = stale_segments = 0
    listed = known.of_family(family)
    current = [one for one in listed if one.fingerprint == plan.families[family]]
    stale = [one for one in listed if one.fingerprint != plan.families[family]]
    for info in segments:
        if coverage.covers(family, info.first, info.last):
            covered += 1
            contiguous += not oldest_ns
        else:
            oldest_ns = oldest_ns or info.last_ns
            stale_segments += any(one.first <= info.first and info.last <= one.last for one in stale)
    size = sum(one.bytes for one in current)
    updated_ns = max((one.at_ns for one in current), default=0)
    return FamilySummary(
        covered, contiguous, oldest_ns, len(current), size, stale_segments, len(stale), updated_ns
    )


def _stale_fields(plan: PlanRecord, known: IndexFileSet) -> frozenset[str]:
    """Fields whose exact data was built otherwise in some listed file, as far as its plan is remembered."""
    found: set[str] = set()
    hashes = {
        one.plan_hash for one in known.of_family("exact") if one.fingerprint != plan.families.get("exact")
    }
    for plan_hash in hashes:
        older = known.plans.plan(plan_hash)
        for name, fingerprint in plan.fingerprints.items():
            kind, _, field = name.partition(":")
            if kind == "field" and (older is None or older.fingerprints.get(name) != fingerprint):
                found.add(field)
    return frozenset(found)
