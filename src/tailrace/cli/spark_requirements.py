"""What commands that start Spark need here, said in one line before Spark says it in its own way."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path

from tailrace.cli.errors import RefusedError


def require_spark(master: str) -> None:
    """PySpark, and a Java that is new enough; a Connect server has one of its own."""
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
        # Spark would take the one of JAVA_HOME, which is not there or too old.
        del os.environ["JAVA_HOME"]
