"""Whether what the pipeline has built may be published. Pure: what is listed and offered in, a change out.

The condition is that inputs and plan are still those it was built from, not that nothing else has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.catalogue import IndexFileSet
from tailrace.storage.coverage import Coverage, stale_index_files
from tailrace.storage.segments.companions import IndexFile, PlanRecord, QuarantinedSegment, has_valid_name
from tailrace.storage.segments.offers import PublishedObject, PublishRequest
from tailrace.storage.segments.segments import SegmentInfo, stream_prefix

OBJECTS_MAX: Final = 4096
TEXT_MAX: Final = 500


class AcceptedPublication(msgspec.Struct, frozen=True):
    """What changes: nothing at all if everything was published before."""

    added: tuple[IndexFile, ...] = ()
    removed: tuple[str, ...] = ()
    quarantined: tuple[QuarantinedSegment, ...] = ()


def decide_publication(
    offer: PublishRequest,
    plan: PlanRecord,
    known: IndexFileSet,
    segments: Mapping[str, SegmentInfo],
    earliest: int,
    now_ns: int,
) -> AcceptedPublication:
    """`segments` are those that the stream shows, by key, as far as the inputs name them. Entries up to
    `earliest` are trimmed: nothing has to speak of them.
    """
    if offer.plan_hash != plan.hash:
        raise TailraceError("plan_superseded", "another plan is wanted now; read the plan again")
    added = [_index_file(offer, one, plan, now_ns) for one in offer.add]
    if offer.job == "merge":
        return _accept_merge(offer, added, plan, known)
    inputs = _input_segments(offer, segments)
    given_up = _quarantined(offer, inputs, now_ns)
    for one in added:
        _check_tiled(one, inputs)
    replaced = {relative_key(key, offer.stream_id) for key in offer.replace}
    gone = [one for one in known.companions if one.object in replaced]
    left = [msgspec.structs.replace(one, first=max(one.first, earliest + 1)) for one in gone]
    return _accept_segments(added, given_up, inputs, plan, known, left)


def decide_quarantine(
    offer: PublishRequest, known: IndexFileSet, segments: Mapping[str, SegmentInfo], now_ns: int
) -> AcceptedPublication:
    """Segments that cannot be joined: they are not what was recorded."""
    given_up = _quarantined(offer, _input_segments(offer, segments), now_ns)
    told = {one.object for one in known.quarantined}
    return AcceptedPublication(quarantined=tuple(one for one in given_up if one.object not in told))


def relative_key(key: str, stream_id: str) -> str:
    """A key in the stream's folder, whether it was named from there or from the root."""
    return key.removeprefix(stream_prefix(stream_id))


def _index_file(offer: PublishRequest, one: PublishedObject, plan: PlanRecord, now_ns: int) -> IndexFile:
    fingerprint = plan.families.get(one.family)
    if fingerprint is None:
        raise TailraceError("invalid_request", f"the plan has no family {one.family[:TEXT_MAX]!r}")
    made = IndexFile(
        one.family,
        one.first,
        one.last,
        one.rows,
        relative_key(one.object, offer.stream_id),
        one.bytes,
        one.sha256,
        one.stats,
        offer.plan_hash,
        0,
        fingerprint,
        now_ns,
    )
    sound = 0 < one.first <= one.last and one.rows >= 0 and one.bytes > 0
    if not sound or not has_valid_name(made):
        raise TailraceError("invalid_request", f"{made.object[:TEXT_MAX]!r} is no name for this companion")
    return made


def _input_segments(offer: PublishRequest, segments: Mapping[str, SegmentInfo]) -> dict[str, SegmentInfo]:
    inputs: dict[str, SegmentInfo] = {}
    for one in offer.inputs:
        key = relative_key(one.object, offer.stream_id)
        found = segments.get(key)
        if found is None or found.sha256 != one.sha256:
            raise _inputs_changed(key)
        inputs[key] = found
    if not inputs:
        raise TailraceError("invalid_request", "inputs must not be empty")
    return inputs


def _inputs_changed(key: str) -> TailraceError:
    return TailraceError("inputs_changed", f"{key[:TEXT_MAX]} is not listed any more, or is another object")


def _quarantined(
    offer: PublishRequest, inputs: Mapping[str, SegmentInfo], now_ns: int
) -> list[QuarantinedSegment]:
    found: list[QuarantinedSegment] = []
    for one in offer.quarantine:
        key = relative_key(one.object, offer.stream_id)
        info = inputs.get(key)
        if info is None:
            raise TailraceError("invalid_request", f"{key[:TEXT_MAX]!r} is not one of the inputs")
        code, message = one.code[:TEXT_MAX], one.message[:TEXT_MAX]
        found.append(QuarantinedSegment(key, info.first, info.last, offer.plan_hash, code, message, now_ns))
    return found


def _check_tiled(one: IndexFile, inputs: Mapping[str, SegmentInfo]) -> None:
    """A companion speaks of whole inputs that follow each other."""
    inside = [info for info in inputs.values() if one.first <= info.first and info.last <= one.last]
    inside.sort(key=lambda info: info.first)
    _check_run(one, [(info.first, info.last) for info in inside])


def _check_run(one: IndexFile, ranges: Sequence[tuple[int, int]]) -> None:
    following = one.first
    for first, last in ranges:
        if first != following:
            break
        following = last + 1
    if following != one.last + 1:
        message = f"{one.family} of entries {one.first} to {one.last} is not made of whole inputs"
        raise TailraceError("range_conflict", message)


def _accept_segments(
    added: list[IndexFile],
    given_up: list[QuarantinedSegment],
    inputs: Mapping[str, SegmentInfo],
    plan: PlanRecord,
    known: IndexFileSet,
    gone: Sequence[IndexFile],
) -> AcceptedPublication:
    """`gone` are those that the others take the place of, as far as there are still entries."""
    replaced = {one.object for one in gone}
    rest = [one for one in known.companions if one.object not in replaced]
    new = _unlisted(added, rest, set())
    coverage = Coverage(plan, [*rest, *new])
    stuck = {one.object for one in given_up}
    for key, info in inputs.items():
        missing = coverage.missing(info.first, info.last)
        if missing and key not in stuck:
            message = f"entries {info.first} to {info.last} would have no {', '.join(missing)}"
            raise TailraceError("range_conflict", message)
    _check_replaced(gone, plan, coverage)
    told = {(one.object, one.plan_hash, one.code) for one in known.quarantined}
    fresh = [one for one in given_up if (one.object, one.plan_hash, one.code) not in told]
    if not new:
        return AcceptedPublication(quarantined=tuple(fresh))
    # Segments that could be built after all, and companions of older plans that these make needless.
    healed = [one.object for one in known.quarantined if one.object in inputs and one.object not in stuck]
    removed = [*stale_index_files(plan, rest, coverage), *healed, *(one.object for one in gone)]
    return AcceptedPublication(tuple(new), tuple(removed), tuple(fresh))


def _check_replaced(gone: Sequence[IndexFile], plan: PlanRecord, coverage: Coverage) -> None:
    """What is taken out has to be said by the others."""
    for one in gone:
        wanted = plan.families.get(one.family) == one.fingerprint
        if wanted and not coverage.covers(one.family, one.first, one.last):
            message = f"entries {one.first} to {one.last} would not all have {one.family}"
            raise TailraceError("range_conflict", message)


def _unlisted(added: Iterable[IndexFile], listed: Iterable[IndexFile], replaced: set[str]) -> list[IndexFile]:
    """Those without an equal or equivalent one. One that overlaps another in any other way is refused."""
    by_making: dict[tuple[str, str], list[IndexFile]] = {}
    for one in listed:
        if one.object not in replaced:
            by_making.setdefault((one.family, one.fingerprint), []).append(one)
    new: list[IndexFile] = []
    for one in added:
        others = by_making.get((one.family, one.fingerprint), [])
        over = [other for other in others if other.first <= one.last and one.first <= other.last]
        if any((other.first, other.last) == (one.first, one.last) for other in over):
            continue
        if any(other.first <= one.first and one.last <= other.last for other in over):
            continue  # it has been merged into a larger one since
        if over:
            message = f"{one.family} of entries {one.first} to {one.last} overlaps {over[0].object}"
            raise TailraceError("range_conflict", message)
        new.append(one)
    for index, one in enumerate(new):
        for other in new[:index]:
            same = (one.family, one.first, one.last) == (other.family, other.first, other.last)
            if (
                one.family == other.family
                and not same
                and other.first <= one.last
                and one.first <= other.last
            ):
                raise TailraceError("range_conflict", f"{one.object} overlaps {other.object}")
    return new


def _accept_merge(
    offer: PublishRequest, added: list[IndexFile], plan: PlanRecord, known: IndexFileSet
) -> AcceptedPublication:
    """Several files may share the range of the output; they take the place of all inputs at once."""
    if not added or len({(one.family, one.first, one.last) for one in added}) != 1:
        raise TailraceError("invalid_request", "a merge has one output, of one family and one range")
    output = added[0]
    replaced = {relative_key(key, offer.stream_id) for key in offer.replace}
    named = {relative_key(one.object, offer.stream_id): one.sha256 for one in offer.inputs}
    if named.keys() != replaced or not named:
        raise TailraceError("invalid_request", "a merge replaces exactly its inputs")
    listed = {one.object: one for one in known.companions}
    made = [
        one
        for one in known.companions
        if (one.family, one.fingerprint, one.first, one.last)
        == (output.family, output.fingerprint, output.first, output.last)
        and one.level
    ]
    if made and not any(key in listed for key in replaced):
        return AcceptedPublication()
    inputs: list[IndexFile] = []
    for key, sha256 in named.items():
        found = listed.get(key)
        if found is None or found.sha256 != sha256:
            raise _inputs_changed(key)
        if (found.family, found.fingerprint) != (output.family, plan.families[output.family]):
            raise _inputs_changed(key)
        inputs.append(found)
    _check_run(output, sorted({(one.first, one.last) for one in inputs}))
    if _unlisted(added, known.companions, replaced) != added:
        raise TailraceError("range_conflict", f"{output.object} overlaps companions that it does not replace")
    level = 1 + max(one.level for one in inputs)
    outputs = [msgspec.structs.replace(one, level=level) for one in added]
    return AcceptedPublication(tuple(outputs), tuple(sorted(replaced)))
