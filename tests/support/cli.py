"""The ``tailrace`` command as a user runs it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from support.forked import ForkedCommand

RUN_S_MAX = 240  # a busy machine is not a failure


class Finished:
    """A command that has ended."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.raw = out
        self.out = out.decode(errors="replace")
        self.err = err.decode(errors="replace")

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
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        streams = (given.fileno(), out.fileno(), err.fileno())
        running = ForkedCommand(args, env=environment(env), cwd=cwd or Path.cwd(), streams=streams)
        try:
            code = running.wait(RUN_S_MAX)
        finally:
            running.kill()
        return Finished(code, *(_content(file) for file in (out, err)))


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
