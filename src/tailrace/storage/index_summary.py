"""How far the index families of a stream are, in numbers. Pure: lists in, a summary out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.log.catalogue import IndexFileSet
from tailrace.storage.coverage import Coverage
from tailrace.storage.segments.companions import PlanRecord, QuarantinedSegment
from tailrace.storage.segments.segments import SegmentInfo


class FamilySummary(msgspec.Struct, frozen=True):
    """One family under the wanted plan. Files of older plans are counted as stale, and in no other number."""

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
