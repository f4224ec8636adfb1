"""Whether what the pipeline has built may be published. Pure: what is listed and offered in, a change out.

The condition is that inputs and plan are still those it was built from, not that nothing else has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.catalogue import CompanionSet
from tailrace.storage.coverage import Coverage, stale
from tailrace.storage.segments.companions import Companion, PlanEntry, Quarantine, is_named_well
from tailrace.storage.segments.offers import AddedObject, Offer
from tailrace.storage.segments.segments import SegmentInfo, stream_prefix

OBJECTS_MAX: Final = 4096
TEXT_MAX: Final = 500


class Accepted(msgspec.Struct, frozen=True):
    """What changes: nothing at all if everything was published before."""

    added: tuple[Companion, ...] = ()
    removed: tuple[str, ...] = ()
    quarantined: tuple[Quarantine, ...] = ()


def decide(
    offer: Offer,
    plan: PlanEntry,
    known: CompanionSet,
    segments: Mapping[str, SegmentInfo],
    earliest: int,
    now_ns: int,
) -> Accepted:
    """`segments` are those that the stream shows, by key, as far as the inputs name them. Entries up to
    `earliest` are trimmed: nothing has to speak of them.
    """
    if offer.plan_hash != plan.hash:
        raise TailraceError("plan_superseded", "another plan is wanted now; read the plan again")
    added = [_companion(offer, one, plan, now_ns) for one in offer.add]
    if offer.job == "merge":
        return _merge(offer, added, plan, known)
    inputs = _input_segments(offer, segments)
    given_up = _given_up(offer, inputs, now_ns)
    for one in added:
        _check_tiled(one, inputs)
    replaced = {relative(key, offer.stream_id) for key in offer.replace}
    gone = [one for one in known.companions if one.object in replaced]
    left = [msgspec.structs.replace(one, first=max(one.first, earliest + 1)) for one in gone]
    return _publish(added, given_up, inputs, plan, known, left)


def give_up(offer: Offer, known: CompanionSet, segments: Mapping[str, SegmentInfo], now_ns: int) -> Accepted:
    """Segments that cannot be joined: they are not what was recorded."""
    given_up = _given_up(offer, _input_segments(offer, segments), now_ns)
    told = {one.object for one in known.quarantined}
    return Accepted(quarantined=tuple(one for one in given_up if one.object not in told))


def relative(key: str, stream_id: str) -> str:
    """A key in the stream's folder, whether it was named from there or from the root."""
    return key.removeprefix(stream_prefix(stream_id))


def _companion(offer: Offer, one: AddedObject, plan: PlanEntry, now_ns: int) -> Companion:
    fingerprint = plan.families.get(one.family)
    if fingerprint is None:
        raise TailraceError("invalid_request", f"the plan has no family {one.family[:TEXT_MAX]!r}")
    made = Companion(
        one.family,
        one.first,
        one.last,
        one.rows,
        relative(one.object, offer.stream_id),
        one.bytes,
        one.sha256,
        one.stats,
        offer.plan_hash,
        0,
        fingerprint,
        now_ns,
    )
    sound = 0 < one.first <= one.last and one.rows >= 0 and one.bytes > 0
    if not sound or not is_named_well(made):
        raise TailraceError("invalid_request", f"{made.object[:TEXT_MAX]!r} is no name for this companion")
    return made


def _input_segments(offer: Offer, segments: Mapping[str, SegmentInfo]) -> dict[str, SegmentInfo]:
    inputs: dict[str, SegmentInfo] = {}
    for one in offer.inputs:
        key = relative(one.object, offer.stream_id)
        found = segments.get(key)
        if found is None or found.sha256 != one.sha256:
            raise _inputs_changed(key)
        inputs[key] = found
    if not inputs:
        raise TailraceError("invalid_request", "inputs must not be empty")
    return inputs


def _inputs_changed(key: str) -> TailraceError:
    return TailraceError("inputs_changed", f"{key[:TEXT_MAX]} is not listed any more, or is another object")


def _given_up(offer: Offer, inputs: Mapping[str, SegmentInfo], now_ns: int) -> list[Quarantine]:
    found: list[Quarantine] = []
    for one in offer.quarantine:
        key = relative(one.object, offer.stream_id)
        info = inputs.get(key)
        if info is None:
            raise TailraceError("invalid_request", f"{key[:TEXT_MAX]!r} is not one of the inputs")
        code, message = one.code[:TEXT_MAX], one.message[:TEXT_MAX]
        found.append(Quarantine(key, info.first, info.last, offer.plan_hash, code, message, now_ns))
    return found


def _check_tiled(one: Companion, inputs: Mapping[str, SegmentInfo]) -> None:
    """A companion speaks of whole inputs that follow each other."""
    inside = [info for info in inputs.values() if one.first <= info.first and info.last <= one.last]
    inside.sort(key=lambda info: info.first)
    _check_run(one, [(info.first, info.last) for info in inside])


def _check_run(one: Companion, ranges: Sequence[tuple[int, int]]) -> None:
    following = one.first
    for first, last in ranges:
        if first != following:
            break
        following = last + 1
    if following != one.last + 1:
        message = f"{one.family} of entries {one.first} to {one.last} is not made of whole inputs"
        raise TailraceError("range_conflict", message)


def _publish(
    added: list[Companion],
    given_up: list[Quarantine],
    inputs: Mapping[str, SegmentInfo],
    plan: PlanEntry,
    known: CompanionSet,
    gone: Sequence[Companion],
) -> Accepted:
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
        return Accepted(quarantined=tuple(fresh))
    # Segments that could be built after all, and companions of older plans that these make needless.
    healed = [one.object for one in known.quarantined if one.object in inputs and one.object not in stuck]
    removed = [*stale(plan, rest, coverage), *healed, *(one.object for one in gone)]
    return Accepted(tuple(new), tuple(removed), tuple(fresh))


def _check_replaced(gone: Sequence[Companion], plan: PlanEntry, coverage: Coverage) -> None:
    """What is taken out has to be said by the others."""
    for one in gone:
        wanted = plan.families.get(one.family) == one.fingerprint
        if wanted and not coverage.covers(one.family, one.first, one.last):
            message = f"entries {one.first} to {one.last} would not all have {one.family}"
            raise TailraceError("range_conflict", message)


def _unlisted(added: Iterable[Companion], listed: Iterable[Companion], replaced: set[str]) -> list[Companion]:
    """Those without an equal or equivalent one. One that overlaps another in any other way is refused."""
    by_making: dict[tuple[str, str], list[Companion]] = {}
    for one in listed:
        if one.object not in replaced:
            by_making.setdefault((one.family, one.fingerprint), []).append(one)
    new: list[Companion] = []
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


def _merge(offer: Offer, added: list[Companion], plan: PlanEntry, known: CompanionSet) -> Accepted:
    """Several files may share the range of the output; they take the place of all inputs at once."""
    if not added or len({(one.family, one.first, one.last) for one in added}) != 1:
        raise TailraceError("invalid_request", "a merge has one output, of one family and one range")
    output = added[0]
    replaced = {relative(key, offer.stream_id) for key in offer.replace}
    named = {relative(one.object, offer.stream_id): one.sha256 for one in offer.inputs}
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
        return Accepted()
    inputs: list[Companion] = []
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
    return Accepted(tuple(outputs), tuple(sorted(replaced)))
