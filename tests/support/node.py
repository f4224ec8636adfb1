"""A program in Node with a test at the wheel: one JSON command in, one JSON answer out."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).resolve().parents[1] / "conformance"


class NodeProgram:
    """One process; ends with the block that it was made for."""

    def __init__(self, script: str, *flags: str) -> None:
        self._process = subprocess.Popen(
            ["node", *flags, script],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a command that it did not live to read
                pipe.close()

    def ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        printed = line = self._process.stdout.readline()
        while line and not line.startswith("=> "):
            line = self._process.stdout.readline()  # libraries print by themselves
            printed += line
        if not line:
            raise AssertionError(f"node has ended:\n{printed}")
        answer = json.loads(line[3:])
        assert "ok" in answer, f"{command['do']}: {answer['error']}"
        return answer["ok"]
