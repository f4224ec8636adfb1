"""The ``tailrace`` command as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Finished:
    """A command that has ended."""

    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        self.code = done.returncode
        self.raw = done.stdout
        self.out = done.stdout.decode(errors="replace")
        self.err = done.stderr.decode(errors="replace")

    @property
    def rows(self) -> list[Any]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "tailrace", *args]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without anybody's settings, wide enough that help is not wrapped."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return {**kept, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def tailrace(
    *args: str, stdin: bytes = b"", env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Finished:
    """Run one command to its end."""
    return Finished(
        subprocess.run(
            command(*args),
            input=stdin,
            capture_output=True,
            env=environment(env),
            cwd=cwd,
            timeout=240,  # a busy machine is not a failure
            check=False,
        )
    )
