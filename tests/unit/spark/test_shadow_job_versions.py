"""Versions of the package as archives, and the report of what they do not agree on."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import tailrace
from tailrace.spark.live_queries.shadow_job import (
    MATCHER_MODULES,
    MatcherProcessError,
    PackageVersionError,
    ShadowVerdict,
    SidePair,
    latency_bucket,
    load_archive,
    matcher_module,
    put_archive,
    quantile,
    render_histogram,
    render_page,
    unpack_archive,
)


def package(directory: Path) -> Path:
    (directory / "tailrace" / "watch" / "__pycache__").mkdir(parents=True)
    (directory / "tailrace" / "__init__.py").write_text("")
    (directory / "tailrace" / "watch" / "one.py").write_text("ONE = 1\n")
    (directory / "tailrace" / "watch" / "__pycache__" / "one.pyc").write_bytes(b"x")
    return directory


def test_a_directory_is_packed_and_unpacked(tmp_path: Path) -> None:
    given = package(tmp_path / "given")
    data = load_archive(str(given))
    assert load_archive(str(given)) == data, "the same files give the same archive"
    store = (tmp_path / "store").as_uri()
    (tmp_path / "store").mkdir()
    unpack_archive(store, put_archive(store, data), tmp_path / "there")
    found = {path.relative_to(tmp_path / "there") for path in (tmp_path / "there").rglob("*.py*")}
    assert found == {Path("tailrace/__init__.py"), Path("tailrace/watch/one.py")}


def _unpacked_with(tmp_path: Path, *modules: str) -> Path:
    """A version whose archive has the given modules, unpacked."""
    source, store, unpacked = tmp_path / "source", tmp_path / "store", tmp_path / "unpacked"
    for name in ("tailrace.__init__", *modules):
        path = (source / name.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    store.mkdir()
    unpack_archive(store.as_uri(), put_archive(store.as_uri(), load_archive(str(source))), unpacked)
    return unpacked


def test_the_matcher_of_a_version_is_found_at_its_current_and_at_its_old_path(tmp_path: Path) -> None:
    current, old = MATCHER_MODULES
    for name, modules, expected in (("new", (current,), current), ("old", (old,), old)):
        (tmp_path / name).mkdir()
        assert matcher_module(_unpacked_with(tmp_path / name, *modules)) == expected
    installed = Path(tailrace.__file__).parent.parent
    assert matcher_module(installed) == current


def test_a_version_without_a_matcher_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MatcherProcessError, match="version has no matcher"):
        matcher_module(_unpacked_with(tmp_path, "tailrace.watch.one"))


def test_what_is_no_version(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    (tmp_path / "broken.whl").write_bytes(b"no archive")
    for name in ("other.whl", "broken.whl", "missing.whl", "missing"):
        with pytest.raises(PackageVersionError):
            load_archive(str(tmp_path / name))


def test_divergence_is_the_share_that_only_one_side_has() -> None:
    verdict = ShadowVerdict("a", "b", matches=SidePair(10, 9), missing=2, extra=1, opDiffers=1)
    # 10 and 9 with 7 in common: 12 in all, 5 of them on one side only.
    assert verdict.divergence == pytest.approx(5 / 12)
    assert ShadowVerdict("a", "b").divergence == 0
    assert "fail" in render_page(ShadowVerdict("a", "b", verdict="fail"))
    assert render_histogram({}).startswith("<svg")


def test_quantiles_are_right_to_a_few_percent() -> None:
    times: dict[int, int] = {}
    for ns in range(1000, 101_000, 1000):
        times[latency_bucket(ns)] = times.get(latency_bucket(ns), 0) + 1
    assert quantile(times, 0.5) == pytest.approx(50, rel=0.06)
    assert quantile(times, 0.99) == pytest.approx(99, rel=0.06)
    assert quantile({}, 0.5) == 0
