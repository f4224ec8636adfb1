"""Programs on a terminal of their own, 80 columns wide, as a person would see them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

WAIT_S = 200.0  # a busy machine is not a failure
COLUMNS = 80
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B]|[=>78])")


class OnTerminal:
    """A program whose input, output and errors are a terminal. Use it as a context manager."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        columns: int = COLUMNS,
        rows: int = 24,
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            # A session of its own with this as its controlling terminal, so that Ctrl-C works.
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env={**kept, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        self.raw = b""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(WAIT_S)
        os.close(self._ours)

    @property
    def shown(self) -> str:
        """What was printed, without colours and cursor movements."""
        return _ESCAPES.sub("", self.raw.decode(errors="replace")).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> None:
        with self._changed:
            seen = self._changed.wait_for(lambda: text in self.shown, WAIT_S)
        assert seen, f"{text!r} did not appear in:\n{self.shown}"

    def wait_end(self) -> int:
        """The exit code, after everything that was printed has been read."""
        code = self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def _collect(self) -> None:
        with suppress(OSError):  # EIO: the last process on the terminal has left
            while piece := os.read(self._ours, 65536):
                with self._changed:
                    self.raw += piece
                    self._changed.notify_all()
