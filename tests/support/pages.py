"""Pages of the documentation, executed as a reader would: one shell, the blocks in order, outputs compared.

| fence | what happens |
|---|---|
| `sh page` | runs in the page's shell and must succeed |
| `sh page refused` | the same, and its last command must fail |
| `sh page in NAME` | goes on in a terminal of its own; another one of the same name ends it first |
| `sh page after NAME` | runs in the page's shell once that terminal was ended, as Ctrl-C would |
| `text` | these lines were printed by the block before, in this order; `...` stands for anything |
| `text NAME` | these lines appear in that terminal, from where the last look ended |
| `python FILE` | is saved under that name in the shell's directory |
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from support.cli import environment

WAIT_S = 200.0  # a busy machine is not a failure
_FENCE = re.compile(r"^```(sh page|text|python )([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_END = "end of block"


class Block(NamedTuple):
    kind: str
    name: str
    text: str


def blocks_of(page: Path, replaced: Mapping[str, str]) -> Iterator[Block]:
    """The fenced blocks of a page, with its printed addresses exchanged for those of the test."""
    text = page.read_text(encoding="utf-8")
    for printed, actual in replaced.items():
        text = text.replace(printed, actual)
    for kind, name, body in _FENCE.findall(text):
        yield Block(kind.strip(), name.strip(), body)


class Terminal:
    """A process whose output is kept, and can be waited for."""

    def __init__(self, command: list[str], directory: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=directory,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def wait_for(self, pattern: re.Pattern[str], start: int = 0) -> re.Match[str]:
        """The first match behind `start`, as soon as it is there."""
        found: re.Match[str] | None = None

        def look() -> bool:
            nonlocal found
            found = pattern.search(self.printed, start)
            return found is not None

        with self._changed:
            self._changed.wait_for(look, WAIT_S)
        assert found is not None, f"{pattern.pattern!r} did not appear in:\n{self.printed[start:]}"
        return found

    def end(self) -> None:
        """SIGTERM, as closing the window would; everything here leaves at that."""
        self._process.terminate()
        self.wait_end()

    def wait_end(self) -> int:
        """The exit code, once the process has left by itself or been told to."""
        try:
            return self._process.wait(WAIT_S)
        finally:
            self._process.kill()
            self._reader.join(WAIT_S)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.printed += line
                self._changed.notify_all()


class PageRun:
    """One reading of one page: its shell, its other terminals, its directory."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self._directory = directory
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._shell = Terminal(["bash", "--norc"], directory, environment({"PATH": path, **env}))
        self._terminals: dict[str, Terminal] = {}
        self._looked_at: dict[str, int] = {}
        self._printed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for terminal in (*self._terminals.values(), self._shell):
            terminal.end()

    def execute(self, block: Block) -> None:
        if block.kind == "python":
            (self._directory / block.name).write_text(block.text, encoding="utf-8")
        elif block.kind == "text":
            self._compare(block)
        elif block.name.startswith("in "):
            self._open(block.name.removeprefix("in "), block.text)
        else:
            if block.name.startswith("after "):
                self._terminals.pop(block.name.removeprefix("after ")).end()
            status = self._run(block.text)
            refused = block.name == "refused"
            assert (status != 0) is refused, f"status {status} of\n{block.text}\n{self._printed}"

    def _run(self, script: str) -> int:
        start = len(self._shell.printed)
        self._shell.type(f"{script}\nprintf '%s %s\\n' '{_END}' $?\n")
        end = self._shell.wait_for(re.compile(rf"{_END} (\d+)\n"), start)
        self._printed = self._shell.printed[start : end.start()]
        return int(end[1])

    def _open(self, name: str, script: str) -> None:
        if name in self._terminals:
            self._terminals[name].end()
        # A new terminal knows what the shell has exported so far.
        assert self._run("env -0 | tr '\\0' '\\1'") == 0
        exported = dict(line.split("=", 1) for line in self._printed.split("\1") if "=" in line)
        self._terminals[name] = Terminal(["bash", "-c", f"exec {script}"], self._directory, exported)
        self._looked_at[name] = 0

    def _compare(self, block: Block) -> None:
        parts = [
            ".*?".join(re.escape(part) for part in line.split("...")) for line in block.text.splitlines()
        ]
        lines = [rf"^{part}[ \r]*$" for part in parts]
        if block.name:
            for line in lines:
                found = self._terminals[block.name].wait_for(
                    re.compile(line, re.MULTILINE), self._looked_at[block.name]
                )
                self._looked_at[block.name] = found.end()
            return
        at = 0
        for line in lines:
            found = re.compile(line, re.MULTILINE).search(self._printed, at)
            assert found is not None, f"{line!r} was not printed, or not in this order:\n{self._printed}"
            at = found.end()
