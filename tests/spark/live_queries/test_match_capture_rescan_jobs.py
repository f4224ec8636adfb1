"""Watch on a real Spark: matching, captures, rescans, statistics, shadow validation of a real log."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tailrace
from support.calls import Caller, eventually
from support.server import ServerProcess
from support.watch_jobs import (
    BASE,
    QUERIES,
    Held,
    Tuple,
    Watching,
    change,
    deliveries,
    metric,
    place_of,
    tuples,
    watch,
)
from tailrace.auth import create_token
from tailrace.spark.live_queries.capture_job import (
    CAPTURE_FILE,
    SUBSCRIPTIONS_FILE,
    Capture,
    CaptureExistsError,
    CaptureOptions,
    run_capture,
)
from tailrace.spark.live_queries.match_job import MatchOptions, MatchReport, run_match
from tailrace.spark.live_queries.rescan_job import RescanOptions, run_rescan
from tailrace.spark.live_queries.shadow_job import (
    PAGE_FILE,
    PICTURE_FILE,
    REPORT_FILE,
    ShadowOptions,
    run_shadow,
    write_report,
)
from tailrace.spark.live_queries.stats_job import StatsOptions, run_stats
from tailrace.spark.live_queries.watch_client import WatchClient
from tailrace.spark.server_client import CLIENTS
from tailrace.watch.external_matching import DeliveryBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = "a secret that is long enough for the server to accept it"
STEPS = 160
HELD: dict[str, dict[str, Any]] = {
    "rare": {"where": "doc.n == 70 || doc.id == 'zz-last' || doc.id == 'held'"},
    "kinds": {"where": "doc.kind == 'b' && doc.n > 60 || doc.id == 'held'"},
}
FAST_ENOUGH = 1e9  # a loaded machine says nothing about time


class Told:
    """A server that has told a client of everything that happened to a collection."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.call = Caller(server)
        body = {"partitions": 3, "readRule": "!has(doc.hidden)"}
        assert self.call("PUT", f"{BASE}/collections/things", body).status == 201
        self.watching: Watching = watch(server, "things", QUERIES)
        change(self.call, "things", STEPS)
        self.events: set[Tuple] = self.watching.events()

    @property
    def place(self) -> WatchClient:
        return place_of(self.server)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    server = ServerProcess(tmp_path_factory.mktemp("watch") / "data").start()
    found = Told(server)
    yield found
    found.watching.live.close()
    CLIENTS.close()
    server.stop()


@pytest.fixture(scope="module")
def captured(
    told: Told, spark_session: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Capture]:
    out = str(tmp_path_factory.mktemp("capture") / "one")
    options = CaptureOptions("default", "things", out, mask=("email",))
    return out, run_capture(spark_session, told.place, options)


# -- match -------------------------------------------------------------------------------------------------


def test_w37_p14_spark_finds_what_the_server_found(told: Told, spark: SparkSession, tmp_path: Path) -> None:
    options = MatchOptions("default", "*", checkpoint=str(tmp_path / "checkpoint"))
    report = run_match(spark, told.place, options)
    assert report.subscriptions == len(QUERIES)
    assert report.collections == ["things"]
    batches = _own(told, report)
    found = tuples(batches)
    assert len(set(found)) == len(found)
    assert set(found) == told.events
    assert {reason for *_, reason in found} >= {"created", "changed", "deleted", "entered", "left", "visible"}
    _check_ranges(batches, report.changes)
    # Once more, as after a crash: the same run, so nothing new.
    assert run_match(spark, told.place, options) == report
    assert _own(told, report) == batches


def _own(told: Told, report: MatchReport) -> list[DeliveryBatch]:
    """What one run has delivered."""
    return [one for one in deliveries(told.call, report.deliveries) if one.owner == report.owner]


def _check_ranges(batches: list[DeliveryBatch], changes: int) -> None:
    """Ranges of a partition follow each other, in the order of the log."""
    reached: dict[int, int] = {}
    for batch in batches:
        assert batch.first == reached.get(batch.partition, 0) + 1
        assert all(batch.first <= item.seq <= batch.last for item in batch.items)
        reached[batch.partition] = batch.last
    assert sum(reached.values()) == changes


def test_those_who_are_behind_go_on_by_what_spark_has_examined(told: Told, spark: SparkSession) -> None:
    """Whoever is held back is sent what the job found, and does not read what concerns nobody."""
    held = Held(told.server, "behind", HELD)
    assert told.call("PUT", f"{BASE}/docs/behind/held", {"n": -1}).status in (200, 201)
    held.take_first()
    other = watch(told.server, "behind", HELD)
    change(told.call, "behind", STEPS, seed=2)
    expected = {(*one[:2], one[2].partition("/")[2], *one[3:]) for one in other.events()}
    skipped = metric(told.call, "tailrace_watch_delivered_skipped_total")
    read = metric(told.call, "tailrace_watch_delivered_batches_total")
    report = run_match(spark, told.place, MatchOptions("default", "behind"))
    count = len(_own(told, report))
    eventually(
        lambda: metric(told.call, "tailrace_watch_delivered_batches_total"),
        lambda found: found >= read + count,
    )
    found = [(*one[:2], one[2].partition("/")[2], *one[3:]) for one in held.catch_up(len(expected))]
    assert len(set(found)) == len(found)
    assert set(found) == expected
    assert metric(told.call, "tailrace_watch_delivered_skipped_total") > skipped
    for live in (held.live, other.live):
        live.close()


def test_jobs_append_with_a_token_of_their_own(spark: SparkSession, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", env={"TAILRACE_AUTH_JWT_SECRET": SECRET}).start()
    try:
        token = create_token(SECRET, sub="m", scopes=["manage"], dbs=["default"])
        call = Caller(server, token)
        assert call("PUT", f"{BASE}/docs/things/one", {"n": 1}).status == 201
        place = WatchClient({"endpoint": server.base_url, "token": token})
        report = run_match(spark, place, MatchOptions("default"))
        (batch,) = deliveries(call, report.deliveries)
        assert (batch.first, batch.last, batch.items) == (1, 1, []), "nobody watches, but it was examined"
    finally:
        CLIENTS.close()
        server.stop()


# -- capture and shadow ------------------------------------------------------------------------------------


def test_w39_masked_values_are_nowhere_in_a_capture(
    told: Told, spark: SparkSession, captured: tuple[str, Capture]
) -> None:
    import pyarrow.parquet as pq

    out, capture = captured
    names = [CAPTURE_FILE, SUBSCRIPTIONS_FILE, *(part.object for part in capture.parts)]
    files = [Path(out) / name for name in names]
    values: list[bytes] = []
    for path in files:
        raw = path.read_bytes()
        if path.suffix == ".parquet":
            values += pq.read_table(path).column("value").to_pylist()
        else:
            values.append(raw)
        assert b"secret-" not in raw
    text = b"\n".join(values)
    assert b"secret-" not in text
    assert b"@example.com" not in text
    assert capture.leftOut == 1, "who looks for the beginning of a masked value cannot be kept"
    assert text.count(b'"kind":"change"') == capture.changes <= changes_of(told)
    assert capture.changes > STEPS / 2
    with pytest.raises(CaptureExistsError):
        run_capture(spark, told.place, CaptureOptions("default", "things", out))


def changes_of(told: Told) -> int:
    return sum(told.call("GET", f"{BASE}/collections/things").body["positions"])


def _version(tmp_path: Path, name: str, more: str) -> str:
    """A copy of the package with something appended to a module of the matcher."""
    directory = tmp_path / name.replace(".", "-")
    package = Path(tailrace.__file__).parent
    # With what is compiled of it: times are kept, so that only the changed module is compiled anew.
    shutil.copytree(package, directory / "tailrace")
    with (directory / "tailrace" / "watch" / name).open("a") as module:
        module.write(more)
    return str(directory)


def test_w39_shadow_passes_a_refactoring_and_finds_a_fault(
    spark: SparkSession, captured: tuple[str, Capture], tmp_path: Path
) -> None:
    out, capture = captured
    refactored = _version(tmp_path, "predicate_index.py", "\nBUCKET_MAX = 2\n")
    options = ShadowOptions("installed", refactored, capture=out, max_latency_ratio=FAST_ENOUGH)
    same = run_shadow(spark, None, options)
    assert (same.verdict, same.missing, same.extra, same.opDiffers) == ("pass", 0, 0, 0)
    assert same.changes == capture.changes
    assert same.matches.baseline == same.matches.candidate > 0
    faulty = _version(tmp_path, "predicate.py", '\n_ENDS["_>=_"] = WITHOUT_LOW\n')
    wrong = run_shadow(spark, None, options._replace(candidate=faulty))
    assert wrong.verdict == "fail"
    assert wrong.missing + wrong.extra + wrong.opDiffers > 0
    assert {one["subscription"].rpartition("/")[2] for one in wrong.examples} == {"between"}
    write_report(wrong, tmp_path / "report")
    written = json.loads((tmp_path / "report" / REPORT_FILE).read_bytes())
    assert written["divergence"] > 0
    assert written["verdict"] == "fail"
    assert len(written["examples"]) <= 100
    assert "fail" in (tmp_path / "report" / PAGE_FILE).read_text()
    assert (tmp_path / "report" / PICTURE_FILE).read_text().startswith("<svg")


# -- stats -------------------------------------------------------------------------------------------------


def test_statistics(told: Told, spark: SparkSession) -> None:
    labels = '{collection="things",database="default"}'
    (found,) = run_stats(spark, told.place, StatsOptions("default", "things"))
    assert metric(told.call, f"tailrace_watch_bloom_rebuilds_total{labels}") == 1
    assert metric(told.call, f"tailrace_watch_bloom_fp_ratio{labels}") == pytest.approx(
        found["bloom"]["falsePositives"], abs=1e-6
    )
    assert STEPS / 2 < found["changes"] <= changes_of(told)
    assert found["subscriptions"] == len(QUERIES)
    kind = next(one for one in found["fields"] if one["field"] == "kind")
    assert (kind["distinct"], kind["kinds"]) == (3, ["string"])
    assert 1 / 3 <= kind["commonest"] < 1
    assert sum(found["partitions"]["changes"].values()) == found["changes"]
    assert found["partitions"]["skew"] >= 1
    assert found["candidatesPerChange"] > 0
    assert found["bloom"]["keys"] > 0
    assert 0 <= found["bloom"]["falsePositives"] <= 1
    assert "example.com" not in json.dumps(found)


# -- rescan ------------------------------------------------------------------------------------------------


def test_a_rescan_finds_and_mends_what_is_wrong(spark: SparkSession, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        call = Caller(server)
        call("PUT", f"{BASE}/collections/things", {"partitions": 2})
        change(call, "things", 40, seed=3)
        assert call("DELETE", f"{BASE}/docs/things/d0").status in (204, 404)
        options = RescanOptions("default", "things", publish_view=True)
        before = run_rescan(spark, place_of(server), options)
        assert (before.missing, before.extra, before.differs, before.broken, before.moving) == (0, 0, 0, 0, 0)
        assert before.published is not None
        shown = _shown(call)
        server.stop()
        _damage(server.data_dir / "watch.db")
        server.start()
        assert _shown(call) != shown
        CLIENTS.close()
        mended = run_rescan(spark, place_of(server), options._replace(publish_view=False, apply=True))
        assert (mended.missing, mended.extra, mended.differs) == (1, 1, 1)
        assert (mended.applied, mended.refused) == (3, 0)
        assert _shown(call) == shown
        after = run_rescan(spark, place_of(server), options._replace(publish_view=False))
        assert (after.missing, after.extra, after.differs) == (0, 0, 0)
    finally:
        CLIENTS.close()
        if server.running:
            server.stop()


def _shown(call: Caller) -> dict[str, Any]:
    found = call("POST", f"{BASE}/query", {"collection": "things", "limit": 1000})
    return {one["id"]: one["data"] for one in found.body["documents"]}


def _damage(path: Path) -> None:
    """One row says something else, one is lost, one is there that never was."""
    connection = sqlite3.connect(path)
    with connection:
        living = [
            row[0]
            for row in connection.execute("SELECT id FROM documents WHERE deleted=0 ORDER BY id LIMIT 2")
        ]
        connection.execute("UPDATE documents SET data=? WHERE id=?", (b'{"n":-1}', living[0]))
        connection.execute("DELETE FROM documents WHERE id=?", (living[1],))
        connection.execute(
            "INSERT INTO documents(collection, id, partition, seq, version, created_ms, updated_ms, deleted,"
            " data) SELECT collection, 'never', partition, seq, 1, 1, 1, 0, data FROM documents LIMIT 1"
        )
    connection.close()
