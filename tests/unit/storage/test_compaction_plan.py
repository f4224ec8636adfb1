"""Which segments are joined, what may stand for them, and when rollups are taken apart for retention."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from support.manifests import CREATED_NS, facts, segment
from tailrace.common.errors import TailraceError
from tailrace.log.model import NO_LIFETIME, Lifetime
from tailrace.storage.compaction import (
    BYTES_MAX,
    COMPACTIONS_OFFERED_MAX,
    ENTRY_BYTES,
    HOUR_NS,
    INPUTS_MAX,
    CompactionRule,
    borders_of,
    decide_compaction,
    due_compactions,
)
from tailrace.storage.index_coverage import Coverage, MergeRule, due_merges
from tailrace.storage.index_work import RollupRetention
from tailrace.storage.segments.index_files import IndexFile, PlanRecord, PublishRequest
from tailrace.storage.segments.model import SegmentInfo, stream_prefix

RULE = CompactionRule(segments_min=3, small_bytes=1000, age_ns=0)
FREE = borders_of(NO_LIFETIME, ())
FAR_NS = CREATED_NS + 10**18


def some(count: int, *, first: int = 1, length: int = 2, **changes: object) -> list[SegmentInfo]:
    """Segments one after the other."""
    infos = [segment(at, at + length - 1) for at in range(first, first + count * length, length)]
    return [msgspec.structs.replace(info, **changes) for info in infos]


def runs(segments: list[SegmentInfo], *, borders: Any = FREE, rule: CompactionRule = RULE) -> list[list[int]]:
    found = due_compactions(segments, rule, borders, lambda _: True, FAR_NS)
    return [[info.first for info in run] for run in found.runs]


def test_small_ones_that_follow_each_other() -> None:
    assert runs(some(3)) == [[1, 3, 5]]
    assert runs(some(2)) == []
    large = msgspec.structs.replace(segment(5, 6), payload_bytes=1000)
    assert runs([*some(3, first=7), large, *some(2)][::-1]) == []
    assert runs([*some(2), large, *some(3, first=7)]) == [[7, 9, 11]]
    assert runs([*some(3), *some(3, first=9)]) == [[1, 3, 5], [9, 11, 13]], "entries 7 and 8 are missing"


def test_no_epoch_version_fork_or_part_of_the_retained_time_is_crossed() -> None:
    assert runs([*some(3), *some(3, first=7, epoch=1)]) == [[1, 3, 5], [7, 9, 11]]
    assert runs(some(6), borders=borders_of(NO_LIFETIME, {6})) == [[1, 3, 5], [7, 9, 11]]
    assert runs(some(6), borders=borders_of(NO_LIFETIME, {5})) == [[7, 9, 11]], "a cut lies within 5 to 6"
    assert runs(some(6), borders=borders_of(NO_LIFETIME, {0, 12, 100})) == [[1, 3, 5, 7, 9, 11]]
    day = borders_of(Lifetime(retention_s=86400), ())
    assert day.bucket_ns == 86400 * 10**8
    hour = borders_of(Lifetime(retention_s=60), ())
    assert hour.bucket_ns == HOUR_NS
    midday = (CREATED_NS // HOUR_NS + 1) * HOUR_NS
    times = [(midday - 3 + n, midday - 3 + n) for n in range(3)] + [
        (midday + n, midday + n) for n in range(3)
    ]
    infos = [
        msgspec.structs.replace(info, first_ns=one, last_ns=other)
        for info, (one, other) in zip(some(6), times, strict=True)
    ]
    assert runs(infos, borders=hour) == [[1, 3, 5], [7, 9, 11]]
    straddling = msgspec.structs.replace(infos[2], last_ns=midday)
    assert runs([*infos[:2], straddling, *infos[3:]], borders=hour) == [[7, 9, 11]]


def test_sizes_are_bounded() -> None:
    each = BYTES_MAX // 4 - 2 * ENTRY_BYTES
    rule = RULE._replace(small_bytes=BYTES_MAX)
    assert runs(some(7, payload_bytes=each), rule=rule) == [[1, 3, 5, 7], [9, 11, 13]]
    tight = borders_of(Lifetime(retention_bytes=10 * 3 * (24 + 2 * ENTRY_BYTES)), ())
    assert runs(some(7), borders=tight) == [[1, 3, 5], [7, 9, 11]]
    many = runs(some(INPUTS_MAX + 3))
    assert [len(run) for run in many] == [INPUTS_MAX, 3]
    apart = [info for n in range(COMPACTIONS_OFFERED_MAX + 2) for info in some(3, first=1 + 10 * n)]
    assert len(runs(apart)) == COMPACTIONS_OFFERED_MAX


def test_age_and_what_is_not_settled() -> None:
    rule = RULE._replace(age_ns=HOUR_NS)
    infos = some(4)

    def at(now_ns: int) -> Any:
        return due_compactions(infos, rule, FREE, lambda _: True, now_ns)

    assert at(infos[2].last_ns + HOUR_NS).runs == (tuple(infos[:3]),)
    early = at(infos[2].last_ns + HOUR_NS - 1)
    assert (early.runs, early.next_ns) == ((), infos[2].last_ns + HOUR_NS)
    assert due_compactions(infos[:2], rule, FREE, lambda _: True, CREATED_NS).next_ns is None
    unsettled = due_compactions(infos, RULE, FREE, lambda info: info.first != 3, FAR_NS)
    assert unsettled.runs == ()


# -- publication ----------------------------------------------------------------------------------------

STREAM = facts(1).stream_id
PREFIX = stream_prefix(STREAM)
INPUTS = some(3)
LISTED = {info.key: info for info in [*INPUTS, segment(7, 8)]}


def joined(**changes: object) -> SegmentInfo:
    sums = {
        "payload_bytes": sum(info.payload_bytes for info in INPUTS),
        "first_ns": INPUTS[0].first_ns,
        "last_ns": INPUTS[-1].last_ns,
    }
    return msgspec.structs.replace(segment(1, 6, content="joined"), **{**sums, **changes})


def offer(info: SegmentInfo, inputs: list[SegmentInfo] | None = None, **changes: Any) -> PublishRequest:
    named = INPUTS if inputs is None else inputs
    stats = {"epoch": info.epoch, "raw_bytes": info.payload_bytes}
    body: dict[str, Any] = {
        "stream_id": STREAM,
        "job": "compact",
        "plan_hash": "",
        "inputs": [{"object": PREFIX + one.key, "sha256": one.sha256} for one in named],
        "add": [
            {
                "family": "segment",
                "first": info.first,
                "last": info.last,
                "rows": info.rows,
                "object": PREFIX + info.key,
                "bytes": info.bytes,
                "sha256": info.sha256,
                "stats": {**stats, "first_ns": info.first_ns, "last_ns": info.last_ns},
            }
        ],
        "replace": [PREFIX + one.key for one in named],
        **changes,
    }
    return msgspec.convert(body, PublishRequest)


def refusal(
    body: PublishRequest, plan: PlanRecord | None = None, companions: tuple[IndexFile, ...] = ()
) -> str:
    with pytest.raises(TailraceError) as refused:
        decide_compaction(body, plan, companions, LISTED)
    return refused.value.code


def test_what_may_take_the_place_of_segments() -> None:
    found = decide_compaction(offer(joined()), None, (), LISTED)
    assert found is not None
    assert (found.segment, found.replaced) == (joined(), tuple(INPUTS))
    done = found.done(7, 3, b"footer", 5)
    assert (done.replaced, done.replaced_bytes) == ([(1, 2), (3, 4), (5, 6)], 3 * 120)
    # Done before, by the same or by another run.
    other = segment(1, 6, content="other")
    assert decide_compaction(offer(joined()), None, (), {other.key: other}) is None


def test_what_may_not() -> None:
    assert refusal(offer(joined(), [])) == "invalid_request"
    assert refusal(offer(joined(), add=[])) == "invalid_request"
    assert refusal(offer(joined(), replace=[])) == "invalid_request"
    assert refusal(offer(joined(), INPUTS[:2])) == "inputs_changed", "a third one lies within"
    assert refusal(offer(joined(), [*INPUTS, segment(9, 10)])) == "inputs_changed"
    others = [msgspec.structs.replace(INPUTS[0], sha256="0" * 64), *INPUTS[1:]]
    assert refusal(offer(joined(), others)) == "inputs_changed"
    assert refusal(offer(joined(payload_bytes=1))) == "range_conflict"
    assert refusal(offer(joined(last_ns=1))) == "range_conflict"
    assert refusal(offer(joined(key="segments/elsewhere"))) == "invalid_request"
    assert refusal(offer(joined(epoch=1))) == "invalid_request", "the name says another epoch"
    wrong = copy.deepcopy(msgspec.to_builtins(offer(joined())))
    wrong["add"][0]["stats"]["epoch"] = "0"
    assert refusal(msgspec.convert(wrong, PublishRequest)) == "invalid_request"


def companion(family: str, first: int, last: int, level: int = 0) -> IndexFile:
    return IndexFile(family, first, last, last - first + 1, f"{family}{first}", 1, "", {}, "p", level, "f")


PLAN = PlanRecord(1, "p", {"agg": "f"})


def test_half_built_segments_are_left_alone() -> None:
    assert decide_compaction(offer(joined()), PLAN, (), LISTED) is not None
    whole = (companion("agg", 1, 2), companion("agg", 3, 8))
    assert decide_compaction(offer(joined()), PLAN, whole, LISTED) is not None
    assert refusal(offer(joined()), PLAN, (companion("agg", 3, 4),)) == "range_conflict"


# -- rollups and retention ------------------------------------------------------------------------------


def test_rollups_are_merged_within_a_part_of_the_retained_time() -> None:
    infos = some(4)
    infos[2:] = [
        msgspec.structs.replace(info, first_ns=info.first_ns + HOUR_NS, last_ns=info.last_ns + HOUR_NS)
        for info in infos[2:]
    ]
    each = [companion("agg", info.first, info.last) for info in infos]
    rule = MergeRule(span=4, fan_out=2, level_max=2)
    free = RollupRetention(infos, NO_LIFETIME, 100, CREATED_NS)
    assert [one.inputs for one in due_merges(PLAN, each, rule, free.part)] == [tuple(each)]
    bound = RollupRetention(infos, Lifetime(retention_s=36_000), 100, CREATED_NS)
    assert due_merges(PLAN, each, rule, bound.part) == []
    pairs = due_merges(PLAN, each, rule._replace(span=2), bound.part)
    assert [one.inputs for one in pairs] == [tuple(each[:2])]


def test_rollups_are_taken_apart_before_retention_comes_to_them() -> None:
    infos = some(6)
    merged = [
        companion("agg", 1, 4, 1),
        companion("agg", 5, 8, 1),
        *(companion("agg", n, n + 1) for n in (9, 11)),
    ]
    coverage = Coverage(PLAN, merged)
    lifetime = Lifetime(retention_s=36_000)  # a part of it is an hour

    def at(now_ns: int) -> tuple[list[int], int | None]:
        found, next_ns = RollupRetention(infos, lifetime, 10**6, now_ns).rewrites(PLAN, merged, coverage, 0)
        return [one.merged.first for one in found], next_ns

    due_ns = infos[0].last_ns + 9 * HOUR_NS
    assert at(due_ns - 1) == ([], due_ns)
    assert at(due_ns) == ([1], infos[2].last_ns + 9 * HOUR_NS)
    assert at(infos[2].last_ns + 9 * HOUR_NS) == ([1, 5], None)
    # By size: all but the newest 100 bytes go, and a tenth more before.
    care = RollupRetention(infos, Lifetime(retention_bytes=100), 6 * 24, CREATED_NS)
    assert care.soon == 4
    (rewrite,), _ = care.rewrites(PLAN, merged, coverage, 0)
    assert rewrite.segments == tuple(infos[:2])
    assert care.part(merged[0]) is None, "what goes soon is not merged again"
    assert care.part(merged[3]) == 0


def test_what_retention_has_left_of_a_merged_file_is_built_again() -> None:
    """Text splits stay right when entries go, but carry them along, and no score comes from them any more."""
    plan = PlanRecord(1, "p", {"fts": "f"})
    infos = some(6)
    merged = [companion("fts", 1, 8, 1), *(companion("fts", n, n + 1) for n in (9, 11))]
    coverage = Coverage(plan, merged)

    def left(earliest: int) -> list[tuple[SegmentInfo, ...]]:
        shown = [info for info in infos if info.last > earliest]
        found, next_ns = RollupRetention(shown, NO_LIFETIME, 100, CREATED_NS).rewrites(
            plan, merged, coverage, earliest
        )
        assert next_ns is None
        return [one.segments for one in found]

    assert left(0) == left(2) == []
    assert left(4) == [tuple(infos[2:4])]
    assert left(7) == [(infos[3],)], "a segment of which a part is trimmed is built as a whole"
    assert left(8) == [], "nothing is left of it"
