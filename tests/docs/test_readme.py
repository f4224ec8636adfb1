"""The README's tour, executed as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from support.cli import environment
from support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PRINTED_URL = "http://127.0.0.1:4437"
ACTIVATED = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
_BLOCK = re.compile(r"^```(sh tour|sh tour live|text|text live)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A fenced block: what it is for and what it says."""

    kind: str
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line]


class Terminal:
    """The third terminal: a command that goes on printing while others run."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
        self._printed = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def wait_for(self, line: str, timeout_s: float = 20.0) -> None:
        with self._changed:
            seen = self._changed.wait_for(lambda: line in self._printed, timeout_s)
        assert seen, f"{line!r} did not appear in:\n{self._printed}"

    def wait_end(self, timeout_s: float = 20.0) -> int:
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._printed += line
                self._changed.notify_all()


def _steps(server: ServerProcess) -> list[Step]:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace(PRINTED_URL, server.base_url)
    tour = text[text.index("## A tour") : text.index("## How it works")]
    return [Step(kind, body) for kind, body in _BLOCK.findall(tour)]


def test_the_tour_does_what_it_says(server: ServerProcess) -> None:
    terminal: Terminal | None = None
    printed = ""
    steps = _steps(server)
    assert [step.kind for step in steps].count("sh tour") >= 5
    for step in steps:
        if step.kind == "sh tour":
            done = subprocess.run(
                ["bash", "-eu", "-c", step.text],
                env=environment({"PATH": ACTIVATED}),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"{step.text}\n{done.stderr}"
            printed = done.stdout
        elif step.kind == "sh tour live":
            terminal = Terminal(step.text)
        elif step.kind == "text live":
            assert terminal is not None
            for line in step.lines:
                terminal.wait_for(line)
        else:
            missing = [line for line in step.lines if line not in printed]
            assert missing == [], f"not printed: {missing}\n{printed}"
    assert terminal is not None
    assert terminal.wait_end() == 0, "closing the stream ends the live reader"
