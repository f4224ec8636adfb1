"""The companion job on a real Spark: what it builds, and what it makes of segments that are bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark import cloudpickle

from support import failing
from support.aggregate_model import rollup_view
from support.companions import Stored, build, plan_of
from support.pipeline import PREFIX, FakeOwner, Shelf, run_once
from support.queries import payload_of
from tailrace.spark.jobs import index_build
from tailrace.spark.jobs.index_build import IndexBuildJob, SegmentBuildResult, VersionMismatchError
from tailrace.spark.jobs.pipeline import UnfinishedError
from tailrace.spark.jobs.pipeline_client import IndexPublisher, PipelineClient, PipelineStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Workers do not have the tests: what fails on purpose is sent along.
cloudpickle.register_pickle_by_value(failing)


def _rows(first: int, count: int) -> list[Stored]:
    return [
        Stored(entry, payload_of({"id": f"id{entry}", "at": entry, "message": f"word {entry}"}), b"k")
        for entry in range(first, first + count)
    ]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "store", plan_of(rollup_view().registry))


Run = Callable[..., dict[int, SegmentBuildResult]]


@pytest.fixture
def run(spark: SparkSession, shelf: Shelf) -> Run:
    def run(**options: Any) -> dict[int, SegmentBuildResult]:
        job = IndexBuildJob(spark, shelf.url, cores=2, **options)
        return {outcome.work.segment.first: outcome for outcome in job.run(shelf.works())}

    return run


def test_i2_p7_every_segment_is_built(shelf: Shelf, run: Run) -> None:
    stored = {first: _rows(first, 30) for first in (1, 31, 61, 91, 121)}
    for rows in stored.values():
        shelf.seal(rows)
    outcomes = run()
    assert outcomes.keys() == stored.keys()
    for first, outcome in outcomes.items():
        assert outcome.status == "built", outcome
        expected = build(stored[first], shelf.plan)
        assert {file.family for file in outcome.files} == expected.keys()
        for file in outcome.files:
            assert len(shelf.get(file.object)) == file.bytes
            if file.family != "fts":
                assert shelf.get(file.object) == expected[file.family].data
    again = run(reference=True)
    for first, outcome in again.items():
        names = {file.object for file in outcome.files if file.family != "fts"}
        assert names == {file.object for file in outcomes[first].files if file.family != "fts"}


def test_p19_a_bad_segment_stays_alone(shelf: Shelf, run: Run) -> None:
    good, missing, corrupt, other = (shelf.seal(_rows(first, 5)) for first in (1, 6, 11, 16))
    (shelf.directory / missing.object).unlink()
    path = shelf.directory / corrupt.object
    path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
    statuses = {first: outcome.status for first, outcome in run().items()}
    assert statuses == {
        good.first: "built",
        missing.first: "missing",
        corrupt.first: "undecodable",
        other.first: "built",
    }


def test_a_worker_that_dies_once_is_replaced(
    shelf: Shelf, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (1, 6, 11):
        shelf.seal(_rows(first, 5))
    monkeypatch.setattr(failing, "VALUE", f"worker:mid_build:{tmp_path / 'died'}")
    monkeypatch.setattr(index_build, "build_index_files", failing.build_companions)
    assert {outcome.status for outcome in run().values()} == {"built"}


def test_p19_the_culprit_is_found(shelf: Shelf, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = (1, 6, 11, 16, 21)
    for first in firsts:
        shelf.seal(_rows(first, 5))
    monkeypatch.setattr(index_build, "build_index_files", failing.die_at_entry_11)
    statuses = {first: outcome.status for first, outcome in run().items()}
    assert statuses == {first: "failed" if first == 11 else "built" for first in firsts}


def test_other_versions_are_refused(shelf: Shelf, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.seal(_rows(1, 5))
    monkeypatch.setattr(index_build, "WRITER", "tailrace-pipeline/0.0.0")
    with pytest.raises(VersionMismatchError, match=r"0\.0\.0"):
        run()


def _added(owner: FakeOwner) -> Sequence[str]:
    return sorted(one.object for body in owner.published for one in body.add if one.family != "fts")


def test_p2_once_does_everything(
    spark: SparkSession, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for first in range(1, 50, 7):
        shelf.seal(_rows(first, 7))
    owner = FakeOwner(shelf)
    pipeline = run_once(owner, spark, monkeypatch, batch_segments=3, group_segments=2, directory=tmp_path)
    assert owner.covered == {segment.object for segment in shelf.segments}
    assert all(len(body.inputs) <= 2 for body in owner.published)
    assert pipeline.status.totals.rows == 49
    assert owner.heartbeats[-1].state == "stopping"
    assert all(key.startswith(PREFIX) for key in _added(owner))
    # A second run finds nothing to do, and another one that lost every answer publishes the same.
    before = _added(owner)
    run_once(owner, spark, monkeypatch, directory=tmp_path)
    assert _added(owner) == before
    other = FakeOwner(shelf)
    run_once(other, spark, monkeypatch, directory=tmp_path)
    assert _added(other) == before


def test_p5_a_pipeline_that_has_lost_everything_finds_what_is_left(
    spark: SparkSession, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No checkpoint, no event, no disk: the plan says what is to be done."""
    done, *left = [shelf.seal(_rows(first, 7)) for first in (1, 8, 15)]
    owner = FakeOwner(shelf)
    owner.covered = {done.object}  # by one of which nothing else is known any more
    run_once(owner, spark, monkeypatch, directory=tmp_path / "new")
    built = [one.object for body in owner.published for one in body.inputs]
    assert sorted(built) == sorted(segment.object for segment in left)


def test_what_is_outdated_is_dropped(
    spark: SparkSession, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tailrace.spark.jobs.pipeline_client import RequestRefusedError

    shelf.seal(_rows(1, 7))
    owner = FakeOwner(shelf)
    owner.faults = [RequestRefusedError(409, "inputs_changed", "gone")]
    pipeline = run_once(owner, spark, monkeypatch, directory=tmp_path)
    assert len(owner.published) == 1  # it was still wanted, and built again
    assert pipeline.status.heartbeat().last_error == "companions: inputs_changed"


def test_what_cannot_be_done_ends_a_run(
    spark: SparkSession, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = shelf.seal(_rows(1, 7))
    shelf.seal(_rows(8, 7))
    (shelf.directory / gone.object).unlink()
    monkeypatch.setattr("tailrace.spark.jobs.pipeline.PAUSE_S_FIRST", 0.001)
    owner = FakeOwner(shelf)
    with pytest.raises(UnfinishedError):
        run_once(owner, spark, monkeypatch, directory=tmp_path)
    assert owner.covered == {shelf.segments[1].object}


def test_quarantine_is_part_of_a_publication(shelf: Shelf) -> None:
    good, bad = shelf.seal(_rows(1, 5)), shelf.seal(_rows(6, 5))
    works = shelf.works()
    owner = FakeOwner(shelf)
    publisher = IndexPublisher(cast("PipelineClient", owner), PipelineStatus("local[1]"), 2)
    publisher.add(SegmentBuildResult(works[1], (), "undecodable", "page header corrupt"))
    publisher.add(SegmentBuildResult(works[0], (), "built", ""))
    (body,) = owner.published
    assert [one.object for one in body.inputs] == [good.object, bad.object]
    assert [(one.object, one.code) for one in body.quarantine] == [(bad.object, "undecodable")]
