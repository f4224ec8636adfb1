"""Checks the requirements of Spark first, for a clear error message."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path

from tailrace.cli.errors import RefusedError


def require_spark(master: str) -> None:
    """Require PySpark and a recent Java; a Spark Connect server has its own Java."""
    if find_spec("pyspark") is None:
        raise RefusedError("this needs Spark: pip install 'tailrace[spark]', and Java 17 or newer")
    if not master.startswith("sc://"):
        _require_java()


def _require_java() -> None:
    from tailrace.server.java import VERSION_MIN, find_java

    found = asyncio.run(find_java())
    if found is None:
        raise RefusedError(
            f"no Java {VERSION_MIN}+ found: set JAVA_HOME, or put java on the PATH (see tailrace doctor)"
        )
    home = os.environ.get("JAVA_HOME")
    if home and Path(found).parent != Path(home) / "bin":
        # Spark would use JAVA_HOME, which is missing or too old.
        del os.environ["JAVA_HOME"]
