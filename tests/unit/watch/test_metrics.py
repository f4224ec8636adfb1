"""Metrics of documents and live queries: each collection apart up to a bound, partitions if that is set."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from support.watch_room import DATABASE, Room
from tailrace.common.metrics import LabeledValues
from tailrace.watch import metrics
from tailrace.watch.collection import OTHER_LABELS, STAGES, Collection, MetricLabels
from tailrace.watch.document import Change
from tailrace.watch.maintenance import Maintenance
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.realtime.subscription import subscribe
from tailrace.watch.sources.model import SourceStatus


def connected(directory: Path, *, partitions: bool = False, **limits: int) -> Room:
    room = Room(directory, watch_audit_retention_ms=0, **limits)
    care = Maintenance(room.context, room.book, room.gateway.keys)
    metrics.register_metrics(room.telemetry, room.gateway, care, partitions=partitions)
    return room


def existing(room: Room, name: str) -> Collection:
    found = room.book.find(DATABASE, name)
    assert found is not None
    return found


def counted(numbers: LabeledValues, labels: MetricLabels) -> dict[tuple[str, ...], float]:
    return {tuple(row[2:]): value for row, value in numbers.current() if tuple(row[:2]) == labels}


def test_w49_each_collection_is_counted_apart_up_to_a_bound(tmp_path: Path) -> None:
    room = connected(tmp_path, watch_partitions=2, watch_metrics_collections=2)
    for number, name in enumerate("abcd"):
        for write in range(number + 1):
            room.write(("put", f"{name}/d{write}", {"n": write}))
    changes = room.telemetry.watch_changes
    assert counted(changes, (DATABASE, "a"))["insert",] == 1
    assert counted(changes, (DATABASE, "b"))["insert",] == 2
    assert counted(changes, OTHER_LABELS)["insert",] == 3 + 4
    states = room.telemetry.watch_partition_state
    assert counted(states, (DATABASE, "a")) == {("live",): 1, ("loading",): 0, ("lagging",): 0, ("stale",): 0}
    assert counted(states, OTHER_LABELS)["live",] == 2
    assert room.remove("a") == 204
    room.write(("put", "d/later", {}), ("put", "e/new", {}))
    assert counted(changes, OTHER_LABELS)["insert",] == 8, "whoever is counted there stays there"
    assert counted(changes, (DATABASE, "e"))["insert",] == 1, "there is room again"
    assert counted(changes, (DATABASE, "a")) == {}
    assert room.telemetry.render().count(b"tailrace_watch_match_hits_total{") == 3
    room.close()


def test_w49_partitions_are_counted_apart_if_that_is_set(tmp_path: Path) -> None:
    room = connected(tmp_path, partitions=True, watch_partitions=4)
    for number in range(40):
        room.write(("put", f"c/d{number}", {"n": number}))
    heard = Counter(one.partition for life in room.heard.values() for one in life)
    found = counted(room.telemetry.watch_changes, (DATABASE, "c"))
    assert {int(place): count for (op, place), count in found.items() if op == "insert"} == dict(heard)
    places = [str(place) for place in range(4)]
    states = counted(room.telemetry.watch_partition_state, (DATABASE, "c"))
    assert [place for (state, place), count in states.items() if state == "live" and count] == places
    lags = counted(room.telemetry.watch_match_lag_changes, (DATABASE, "c"))
    assert lags == {(place,): 0 for place in places}
    room.close()


def test_what_is_watched_no_more_is_still_counted(tmp_path: Path) -> None:
    room = connected(tmp_path)
    session, _ = room.connect()
    room.harness.call(lambda: watch(session))
    for number in range(10):
        room.write(("put", "c/one", {"n": number}))
    candidates = room.telemetry.watch_match_candidates
    before = counted(candidates, (DATABASE, "c"))
    assert before[()] == 10
    room.harness.call(session.on_gone)
    assert room.gateway.all_watched() == []
    assert counted(candidates, (DATABASE, "c")) == before
    assert counted(candidates, OTHER_LABELS) == {(): 0}
    room.close()


def test_a_look_for_a_sample_is_not_counted_as_matching(tmp_path: Path) -> None:
    """A slow change is looked at once more, to name the one who took longest."""
    room = connected(tmp_path)
    session, _ = room.connect()
    room.harness.call(lambda: watch(session))
    room.write(("put", "c/one", {"n": 1}))
    (watched,) = room.gateway.all_watched()
    (heard,) = [one for life in room.heard.values() for one in life]
    # It has the documents before and after, which is all that an index looks at.
    assert len(watched.matcher.find_candidates(cast("Change", heard))) == 1
    assert counted(room.telemetry.watch_match_candidates, (DATABASE, "c")) == {(): 1}
    room.close()


def watch(session: RealtimeSession) -> None:
    subscribe(session, "s", {"query": {"collection": "c", "where": "has(doc.n)"}})


def test_a_bloom_filter_that_is_often_wrong_burns_its_allowance(tmp_path: Path) -> None:
    room = connected(tmp_path)
    room.write(("put", "c/one", {}))
    collection, objectives = existing(room, "c"), room.gateway.objectives
    ratio = room.telemetry.watch_bloom_fp_ratio
    assert objectives.burn_rates(DATABASE, "c", collection)["bloom"] == 0
    assert counted(ratio, (DATABASE, "c")) == {}, "nobody has measured it"
    collection.bloom_ratio = 0.02
    assert counted(ratio, (DATABASE, "c")) == {(): 0.02}
    assert objectives.burn_rates(DATABASE, "c", collection)["bloom"] == pytest.approx(2)
    room.configure("c", slo={"bloomRatio": 0.05})
    assert objectives.burn_rates(DATABASE, "c", collection)["bloom"] == pytest.approx(0.4)
    room.configure("c", slo={"bloomRatio": 0.015})
    room.harness.call(objectives.on_tick)
    worst = {labels[0]: burn for labels, burn in objectives.worst_burn_rates()}
    assert worst["bloom"] > 1
    assert "1.50%" in objectives.explain(collection, objectives.burn_rates(DATABASE, "c", collection))
    room.close()


def test_every_stage_that_leaves_something_out_has_a_row(tmp_path: Path) -> None:
    room = connected(tmp_path)
    room.write(("put", "c/one", {}))
    dropped = room.telemetry.watch_dedup_dropped
    assert counted(dropped, (DATABASE, "c")) == {(stage,): 0 for stage in STAGES}
    room.writer.count_repeats(DATABASE, "c", "push", 2)
    room.writer.count_repeats(DATABASE, "nowhere", "push", 1)
    assert counted(dropped, (DATABASE, "c"))["push",] == 2
    assert counted(dropped, OTHER_LABELS)["push",] == 1
    room.close()


def test_how_far_a_source_is_behind_is_told_of_its_collections(tmp_path: Path) -> None:
    room = connected(tmp_path)
    room.write(("put", "native/one", {}), ("put", "followed/one", {}))
    status = SourceStatus(clock=room.context.clock, connected=True)
    status.lag_changes = 7
    status.set_caught_up(all_read=False)
    assert status.to_json()["lagChanges"] == 7
    status.lag_changes = 0
    status.set_caught_up(all_read=False)
    assert status.lag_changes == 1, "there is more, and nobody says how much"
    followed = existing(room, "followed")
    followed.config = followed.config.with_changes(source="pg")
    room.gateway.objectives.lag_changes = lambda one: status.lag_changes if one is followed else 0
    lags = room.telemetry.watch_source_lag_changes
    assert dict(map(_joined, lags.current())) == {"followed": 1}
    status.set_caught_up(all_read=True)
    assert dict(map(_joined, lags.current())) == {"followed": 0}
    room.close()


def _joined(row: tuple[list[str], float]) -> tuple[str, float]:
    return row[0][1], row[1]
