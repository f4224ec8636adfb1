"""Merged companions and retention.

Sums over many segments are no use once some of their entries are trimmed: so they are only merged within a
part of the time that is retained, and taken apart again before retention comes to that part. Other merged
files stay right, but carry trimmed entries along: when these are too many, the rest is built again. Pure:
lists in, work out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from tailrace.log.model import Lifetime
from tailrace.storage.compaction import RETENTION_SHARE, borders_of
from tailrace.storage.coverage import Coverage
from tailrace.storage.segments.companions import IndexFile, PlanRecord
from tailrace.storage.segments.segments import SegmentInfo

ROLLUP_FAMILY: Final = "agg"
REWRITES_OFFERED_MAX: Final = 4  # of one stream in one answer
REWRITE_SEGMENTS_MAX: Final = 512  # of one rewrite: all are published at once
TRIMMED_SHARE: Final = 0.3  # of a merged file, beyond which the rest of it is built again


class RollupRewrite(NamedTuple):
    """A merged file that is to be built again, for each of the segments that are left by itself."""

    merged: IndexFile
    segments: tuple[SegmentInfo, ...]


class RollupRetention:
    """The segments that a stream shows, oldest first, and its bounds. `shown_bytes` is all its payload."""

    def __init__(
        self, segments: Sequence[SegmentInfo], lifetime: Lifetime, shown_bytes: int, now_ns: int
    ) -> None:
        self._segments = segments
        self._firsts = [info.first for info in segments]
        self._lifetime = lifetime
        self._borders = borders_of(lifetime, ())
        self.soon = self._soon(shown_bytes, now_ns)  # entries up to this one go within one part of the time

    def _soon(self, newer_bytes: int, now_ns: int) -> int:
        through = 0
        bound = self._lifetime.retention_bytes
        for info in self._segments:
            newer_bytes -= info.payload_bytes
            at_ns = self._due_ns(info)
            by_age = at_ns is not None and at_ns <= now_ns
            by_size = bound is not None and newer_bytes >= bound - bound // RETENTION_SHARE
            if not by_age and not by_size:
                break
            through = info.last
        return through

    def _due_ns(self, info: SegmentInfo) -> int | None:
        """One part of the time before a segment is trimmed for its age."""
        if self._lifetime.retention_s is None:
            return None
        return info.last_ns + self._lifetime.retention_s * 10**9 - self._borders.bucket_ns

    def part(self, companion: IndexFile) -> int | None:
        """The part of time in which it may be merged with others; None if with nobody."""
        parts = {self._borders.bucket(info) for info in self._touched(companion)}
        return parts.pop() if len(parts) == 1 and companion.first > self.soon else None

    def _touched(self, companion: IndexFile) -> Sequence[SegmentInfo]:
        begin = max(0, bisect_right(self._firsts, companion.first) - 1)
        return self._segments[begin : bisect_right(self._firsts, companion.last)]

    def _within(self, companion: IndexFile) -> Sequence[SegmentInfo]:
        """The segments it speaks of, if these are whole ones."""
        found = self._touched(companion)
        whole = found and (found[0].first, found[-1].last) == (companion.first, companion.last)
        return found if whole else ()

    def _left(self, companion: IndexFile, earliest: int) -> Sequence[SegmentInfo]:
        """The segments that are left of a merged file, if it speaks of trimmed entries for the most part."""
        trimmed, rows = earliest - companion.first + 1, companion.last - companion.first + 1
        if not companion.level or trimmed <= rows * TRIMMED_SHARE:
            return ()
        found = self._touched(companion)
        return found if found and found[-1].last == companion.last else ()

    def rewrites(
        self, plan: PlanRecord, companions: Sequence[IndexFile], coverage: Coverage, earliest: int
    ) -> tuple[list[RollupRewrite], int | None]:
        """Those that are due, oldest first; and when the next is. `earliest` is the last trimmed entry."""
        due: list[RollupRewrite] = []
        next_ns: int | None = None
        for one in companions:
            if one.fingerprint != plan.families.get(one.family):
                continue
            found = self._within(one) if one.family == ROLLUP_FAMILY else self._left(one, earliest)
            settled = not any(coverage.missing(info.first, info.last) for info in found)
            if (
                not settled
                or not (2 if one.family == ROLLUP_FAMILY else 1) <= len(found) <= REWRITE_SEGMENTS_MAX
            ):
                continue
            if one.family != ROLLUP_FAMILY or one.first <= self.soon:
                due.append(RollupRewrite(one, tuple(found)))
            elif (at_ns := self._due_ns(found[0])) is not None:
                next_ns = at_ns if next_ns is None else min(next_ns, at_ns)
        return due[:REWRITES_OFFERED_MAX], next_ns
