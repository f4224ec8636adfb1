"""Which small segments should become one, and whether what was made of them may stand for them.

Pure: what is listed in, work or a decision out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tailrace.common.errors import TailraceError
from tailrace.log.compaction import CompactionIntent
from tailrace.log.model import Lifetime
from tailrace.storage.coverage import Coverage
from tailrace.storage.segments.companions import SEGMENT_FAMILY, IndexFile, PlanRecord
from tailrace.storage.segments.offers import PublishedObject, PublishRequest
from tailrace.storage.segments.segments import SegmentInfo, segment_name, stream_prefix

HOUR_NS: Final = 3600 * 10**9
BYTES_MAX: Final = 64 << 20  # payload of a joined segment, with something for each entry
ENTRY_BYTES: Final = 32
INPUTS_MAX: Final = 512
COMPACTIONS_OFFERED_MAX: Final = 4  # of one stream in one answer
RETENTION_SHARE: Final = 10  # so many parts of what a stream retains are trimmed one by one


class CompactionRule(NamedTuple):
    """From how many adjacent segments on, up to which size of each, and from which age on."""

    segments_min: int
    small_bytes: int
    age_ns: int


class CompactionBorders(NamedTuple):
    """What no segment may reach across."""

    cuts: Sequence[int]  # entries, in order: none of them shares a segment with the one behind it
    bucket_ns: int  # append times of one segment lie in one of the parts of this length; 0: anywhere
    bytes_max: int

    def is_cut(self, first: int, last: int) -> bool:
        """Whether there is a cut between two entries of a range."""
        index = bisect_left(self.cuts, first)
        return index < len(self.cuts) and self.cuts[index] < last

    def bucket(self, info: SegmentInfo) -> int | None:
        """The part of time a segment lies in; None if it lies in several."""
        if not self.bucket_ns:
            return 0
        first, last = info.first_ns // self.bucket_ns, info.last_ns // self.bucket_ns
        return first if first == last else None


class DueCompactions(NamedTuple):
    """Runs of segments to be joined, oldest first; and when there will be more without anything new."""

    runs: tuple[tuple[SegmentInfo, ...], ...] = ()
    next_ns: int | None = None


def borders_of(lifetime: Lifetime, cuts: Collection[int]) -> CompactionBorders:
    """Retention trims whole segments: what it keeps too long is a tenth of its bound, or an hour."""
    bucket_ns, bytes_max = 0, BYTES_MAX
    if lifetime.retention_s is not None:
        bucket_ns = max(lifetime.retention_s * 10**9 // RETENTION_SHARE, HOUR_NS)
    if lifetime.retention_bytes is not None:
        bytes_max = min(bytes_max, lifetime.retention_bytes // RETENTION_SHARE)
    return CompactionBorders(sorted(cuts), bucket_ns, bytes_max)


def due_compactions(
    segments: Sequence[SegmentInfo],
    rule: CompactionRule,
    borders: CompactionBorders,
    is_settled: Callable[[SegmentInfo], bool],
    now_ns: int,
) -> DueCompactions:
    """`is_settled` tells whether anything is still to be built of a segment: then it is left alone."""
    found: list[tuple[SegmentInfo, ...]] = []
    next_ns: int | None = None
    for run in _runs(segments, rule, borders, is_settled):
        old = [info for info in run if info.last_ns + rule.age_ns <= now_ns]
        if len(old) >= rule.segments_min:
            found.append(tuple(old))
        elif len(run) >= rule.segments_min:
            at_ns = run[rule.segments_min - 1].last_ns + rule.age_ns
            next_ns = at_ns if next_ns is None else min(next_ns, at_ns)
    return DueCompactions(tuple(found[:COMPACTIONS_OFFERED_MAX]), next_ns)


def _runs(
    segments: Sequence[SegmentInfo],
    rule: CompactionRule,
    borders: CompactionBorders,
    is_settled: Callable[[SegmentInfo], bool],
) -> Iterator[list[SegmentInfo]]:
    """Small segments that follow each other and may be one, whatever their age."""
    run: list[SegmentInfo] = []
    size = 0
    for info in segments:
        fits = (
            info.payload_bytes < rule.small_bytes
            and borders.bucket(info) is not None
            and not borders.is_cut(info.first, info.last)
            and is_settled(info)
        )
        weight = info.payload_bytes + ENTRY_BYTES * info.rows
        if run and not (fits and size + weight <= borders.bytes_max and _continues(run, info, borders)):
            yield run
            run, size = [], 0
        if fits:
            run.append(info)
            size += weight
    if run:
        yield run


def _continues(run: list[SegmentInfo], info: SegmentInfo, borders: CompactionBorders) -> bool:
    last = run[-1]
    return (
        len(run) < INPUTS_MAX
        and info.first == last.last + 1
        and info.epoch == last.epoch
        and borders.bucket(info) == borders.bucket(last)
        and not borders.is_cut(last.last, info.first)
    )


# -- publication ---------------------------------------------------------------------------------------


def decide_compaction(
    offer: PublishRequest,
    plan: PlanRecord | None,
    companions: Sequence[IndexFile],
    segments: Mapping[str, SegmentInfo],
) -> CompactionIntent | None:
    """What takes the place of what; None if that has happened already.

    `segments` are all that the stream shows, by key.
    """
    if len(offer.add) != 1 or offer.add[0].family != SEGMENT_FAMILY:
        raise TailraceError("invalid_request", "a compaction has one output, which is a segment")
    prefix = stream_prefix(offer.stream_id)
    named = {one.object.removeprefix(prefix): one.sha256 for one in offer.inputs}
    if named.keys() != {key.removeprefix(prefix) for key in offer.replace} or len(named) < 2:
        raise TailraceError("invalid_request", "a compaction replaces exactly its inputs, two at least")
    joined = offered_segment(offer.add[0], prefix)
    listed = [info for info in segments.values() if info.first <= joined.last and joined.first <= info.last]
    if len(listed) == 1 and (listed[0].first, listed[0].last) == (joined.first, joined.last):
        return None
    inputs = sorted((info for info in listed if info.key in named), key=lambda info: info.first)
    if len(inputs) != len(named) or len(listed) != len(named):
        raise TailraceError("inputs_changed", "one of the segments is not listed any more")
    if any(info.sha256 != named[info.key] for info in inputs):
        raise TailraceError("inputs_changed", "one of the segments is another object")
    _check_sums(joined, inputs)
    _check_companions(joined, plan, companions)
    return CompactionIntent(joined, tuple(inputs))


def offered_segment(one: PublishedObject, prefix: str) -> SegmentInfo:
    """What is recorded about an offered segment, taken at its word."""
    values = [one.stats.get(name) for name in ("epoch", "raw_bytes", "first_ns", "last_ns")]
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) != len(values):
        raise TailraceError("invalid_request", "stats must tell epoch, raw_bytes, first_ns and last_ns")
    epoch, payload_bytes, first_ns, last_ns = numbers
    key = one.object.removeprefix(prefix)
    sound = 0 < one.first <= one.last and one.rows == one.last - one.first + 1 and one.bytes > 0
    if not sound or key != segment_name(epoch, one.first, one.last, one.sha256):
        raise TailraceError("invalid_request", "the object is not named as this segment would be")
    return SegmentInfo(
        key=key,
        epoch=epoch,
        first=one.first,
        last=one.last,
        rows=one.rows,
        bytes=one.bytes,
        payload_bytes=payload_bytes,
        sha256=one.sha256,
        first_ns=first_ns,
        last_ns=last_ns,
    )


def _check_sums(joined: SegmentInfo, inputs: Sequence[SegmentInfo]) -> None:
    following = joined.first
    for info in inputs:
        if info.first != following or info.epoch != joined.epoch:
            raise TailraceError("range_conflict", "the segments do not follow each other in one epoch")
        following = info.last + 1
    if following != joined.last + 1:
        raise TailraceError("range_conflict", "the joined segment has other entries than its inputs")
    told = (joined.payload_bytes, joined.first_ns, joined.last_ns)
    if told != (sum(info.payload_bytes for info in inputs), inputs[0].first_ns, inputs[-1].last_ns):
        raise TailraceError("range_conflict", "the joined segment has other bytes or times than its inputs")


def _check_companions(joined: SegmentInfo, plan: PlanRecord | None, companions: Sequence[IndexFile]) -> None:
    """Either everything that is wanted of the inputs is built, or nothing: a half could never be completed.

    Companions are built for whole segments, and none may overlap another.
    """
    if plan is None:
        return
    for family in Coverage(plan, companions).missing(joined.first, joined.last):
        making = (family, plan.families[family])
        if any(
            (one.family, one.fingerprint) == making and one.first <= joined.last and joined.first <= one.last
            for one in companions
        ):
            message = f"{family} of entries {joined.first} to {joined.last} is being built"
            raise TailraceError("range_conflict", message)
