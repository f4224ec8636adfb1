"""What `pip install tailrace[spark]` brings: the module that PySpark looks for, and what it needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

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
