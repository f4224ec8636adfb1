"""Rules of the pipeline's code: only what Spark Connect has, and nothing of Spark in the package itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace.spark
from tailrace.spark.session import (
    SETTINGS,
    build_settings,
    core_count,
    normalize_master,
    parse_extra_settings,
)

SOURCES = sorted(Path(tailrace.spark.__file__).parent.rglob("*.py"))
# What a session over the network does not have.
FORBIDDEN = {
    "rdd",
    "sparkContext",
    "SparkContext",
    "_jvm",
    "_jdf",
    "_jsparkSession",
    "broadcast",
    "accumulator",
    "parallelize",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_names_that_connect_lacks(path: Path) -> None:
    found = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert not found & FORBIDDEN


def test_nobody_imports_spark_by_accident() -> None:
    modules = "tailrace, tailrace.spark.jobs.pipeline, tailrace.cli.app"
    code = f"import sys, {modules}; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_masters() -> None:
    assert normalize_master("local") == "local[1,4]"
    assert normalize_master("local[*]") == "local[*,4]"
    assert normalize_master("local[3]") == "local[3,4]"
    assert normalize_master("local[3,2]") == "local[3,2]"
    assert normalize_master("spark://host:7077") == "spark://host:7077"
    assert core_count("local[3,4]") == 3


def test_settings(tmp_path: Path) -> None:
    settings = build_settings(
        "local[3,4]", tmp_path, heap_bytes=1 << 30, extra=parse_extra_settings("a.b=1, c=d=e")
    )
    assert settings.items() >= SETTINGS.items()
    assert settings["spark.sql.shuffle.partitions"] == "6"
    assert settings["spark.driver.memory"] == "1024m"
    assert (settings["a.b"], settings["c"]) == ("1", "d=e")
    with pytest.raises(ValueError, match="results depend on it"):
        build_settings("local[3,4]", tmp_path, extra={"spark.sql.session.timeZone": "CET"})
    with pytest.raises(ValueError, match="name=value"):
        parse_extra_settings("oops")
