"""The bench of the pipeline as a program: stages are kept, run again if they failed, ended in time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from bench.pages import write_section
from bench.pipeline import __main__ as program
from bench.pipeline import stages
from bench.pipeline.place import Place, StageError, read_record
from bench.pipeline.report import markdown

FIGURES = {
    "companions": {"rows_per_s": 120_000.0, "peak_spark_mb": 9000.0, "per_segment_byte": 0.5},
    "queries": {
        "classes": {
            "exact id": {
                "p50_ms": 12.0,
                "p99_ms": 20.0,
                "goal_ms": 10.0,
                "asked": 3,
                "timed_out": 1,
                "incomplete": 0,
                "failed": 0,
            }
        }
    },
    "engines": {"readings": {"read all": {"DuckDB": {"seconds": 0.5, "cpu_s": 0.9}}}},
    "spark": {"rows_per_s": {"spark.read.parquet": 10_000.0, "history": 9000.0}},
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(20_000, tmp_path / "data", tmp_path / "out")
    found.results.mkdir(parents=True)
    return found


def keep(place: Place, stage: str, failed: str | None = None) -> None:
    stages.write(place.results / f"{stage}.json", stages.record(stage, dict(FIGURES.get(stage, {})), failed))


def test_what_was_found_is_shown_beside_its_goal(place: Place) -> None:
    for stage in FIGURES:
        keep(place, stage)
    keep(place, "live", "not done after 900 s")
    text = markdown([place])
    assert "| companions, all families, warm session | at least 100,000 events/s | 120,000 events/s |" in text
    assert "9,000 MB **missed** |" in text
    assert "| exact id | 10 | 12.0 (20.0), 1 of 3 not answered in full **missed** |" in text
    assert "| read all | 0.50 (0.90) |  | 2.00 |" in text
    assert "- 20,000 events, live: not done after 900 s" in text


def test_a_section_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nText.\n")
    for text in ("first\n", "second\n"):
        write_section(page, "x", "Heading", text)
    assert page.read_text() == "# Page\n\nText.\n\n## Heading\n\n<!-- x: begin -->\nsecond\n<!-- x: end -->\n"


def test_only_what_is_missing_is_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(place, "kernels")
    keep(place, "load", "no disk")
    ran: list[str] = []

    def run(stage: stages.Stage, place: Place, _limit_s: float | None, *, adopting: bool) -> object:
        assert adopting
        ran.append(stage.name)
        keep(place, stage.name, "again" if stage.name == "load" else None)
        return read_record(place.results / f"{stage.name}.json")

    monkeypatch.setattr(stages, "run", run)
    monkeypatch.setattr(stages, "adopt", lambda: None)
    data, out = str(place.directory.parent), str(place.results.parent.parent)
    arguments = ["--events", "20000", "--data", data, "--out", out, "--only", "kernels,load,companions"]
    assert program.main(arguments) == 1
    assert ran == ["load", "companions"]
    assert program.main([*arguments, "--again"]) == 1
    assert ran[2:] == ["kernels", "load", "companions"]
    assert program.main(["--only", "nothing"]) == 2


def test_a_stage_that_takes_too_long_is_ended(place: Place) -> None:
    """The kernels need more than a moment; nothing of theirs is left."""
    found = stages.run(stages.BY_NAME["kernels"], place, 0.1)
    assert found.failed == "not done after 0 s"
    assert read_record(place.results / "kernels.json") == found
    with pytest.raises(StageError, match="kernels"):
        place.figures("kernels")


def test_a_record_of_another_version_counts_as_none(place: Place) -> None:
    path = place.results / "load.json"
    path.write_bytes(msgspec.json.encode({"what": "else"}))
    assert read_record(path) is None
