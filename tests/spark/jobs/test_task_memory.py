"""What a task takes while it builds, for records of every accepted shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.task_memory import SHAPES

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "task_memory.py"


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_p18_a_task_keeps_within_its_memory(shape: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), shape], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    taken, budget = map(int, done.stdout.split())
    assert 0 < taken <= budget
