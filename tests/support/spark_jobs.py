"""The job of `spark_anywhere.py` in a process of its own, and what it has to have done."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from support.spark_rows import Filled, served

SCRIPT = Path(__file__).with_name("spark_anywhere.py")


def job(
    master: str, seamed: Filled, source: str, target: str, directory: Path, staging: str | None = None
) -> list[str]:
    given = [master, seamed.url, source, target, str(directory), *([staging] if staging else [])]
    return [sys.executable, str(SCRIPT), *given]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Without a module path: all that processes have is what is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(extra)


def assert_same_rows(seamed: Filled, source: str, target: str) -> None:
    """Each row of the source is in the target once."""
    copied, wanted = (
        sorted(((row["payload"], row["key"]) for row in served(seamed.server, stream)), key=str)
        for stream in (target, source)
    )
    assert copied == wanted
