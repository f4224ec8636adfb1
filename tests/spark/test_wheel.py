"""What `pip install tailrace[spark]` brings: the module that PySpark looks for, and what it needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tailrace.protocol import offsets

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_has_the_source_that_spark_looks_for(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = packed.read(metadata).decode()
    assert {"pyspark_tailrace/__init__.py", "tailrace/spark/source.py", "tailrace/spark/sink.py"} <= names
    assert "Provides-Extra: spark\n" in said
    assert "pyspark[connect]==4.3.*; extra == 'spark'" in said
    assert not any(name.startswith("tests/") for name in names)


def test_tailrace_itself_knows_no_spark() -> None:
    """Without the extra everything else goes on working: nothing of it is imported by the package."""
    script = "import sys, tailrace, tailrace.client, tailrace.cli.app; print('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def run_alone(script: str) -> str:
    """In a process of its own, as each step of a read or a write is."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_whoever_looks_for_the_source_loads_nothing_else() -> None:
    """Spark asks for it in a new process each time; the libraries behind it take most of a second."""
    heavy = "('pandas', 'pyarrow.parquet', 'httpx2', 'tailrace.spark.catalogue', 'tailrace.spark.history')"
    script = f"import sys, pyspark_tailrace; print([name for name in {heavy} if name in sys.modules])"
    assert run_alone(script) == "[]"


def test_source_and_sink_do_without_pandas() -> None:
    """PyArrow loads it for many a small favour, and that doubles how long a process takes to start."""
    script = """
import sys
import pyarrow as pa
from tailrace.spark import sink, stream_reader
from tailrace.spark.columns import encode_offsets
from tailrace.storage.segments.parquet import INT64, integer_scalar, string_scalar
entries = pa.repeat(integer_scalar(INT64, 7), 2)
print(encode_offsets(entries, entries).to_pylist()[0], string_scalar("ä").as_py(), "pandas" in sys.modules)
"""
    assert run_alone(script) == f"{offsets.encode_offset(7, 7)} ä False"


def test_what_the_package_offers_is_what_it_says() -> None:
    script = "from tailrace.spark import *; print(StreamLag.__name__, *(one.__name__ for one in OFFERED))"
    script = script.replace("OFFERED", "(lag, read_stream_history, register)")
    assert run_alone(script) == "StreamLag lag read_stream_history register"
