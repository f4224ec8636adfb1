"""A real server process for tests: started as users start it, ended as machines end it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from support.forked import ForkedCommand

START_S_MAX = 60.0
STOP_S_MAX = 60.0
_READY = re.compile(r"tailrace ready\s+(https?://\S+)")
# Tests run side by side: what takes seconds on a busy machine is not what they are about. A journal of the
# usual size is 64 MiB of zeros, for each of a thousand servers. Before a bootstrap there is no living server.
HURRY = {
    "TAILRACE_REQUEST_MS": "60000",
    "TAILRACE_APPEND_MS": "30000",
    "TAILRACE_JOURNAL_FILE_BYTES": "2MiB",
    "TAILRACE_BOOTSTRAP_SETTLE_MS": "1",
}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerFailedError(AssertionError):
    """The process did not do what was asked; the message carries its log."""


class ServerProcess:
    """One ``tailrace serve``. The first free port is kept over restarts, so that clients can come back."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        plain: bool = False,
    ) -> None:
        """`plain` is as users start it, with a fresh interpreter and every default."""
        self.data_dir = data_dir
        self.plain = plain
        self.port = port
        self.args = tuple(args)
        self.env = dict(env or {})
        self.base_url = ""
        self._process: subprocess.Popen[bytes] | ForkedCommand | None = None
        self._lines: deque[str] = deque(maxlen=5000)
        self._announced = threading.Event()
        self._reader: threading.Thread | None = None

    # Starting and ending.

    def start(self, *, ready: bool = True) -> ServerProcess:
        """Start the process and wait until it serves. With ``ready=False`` only start it."""
        assert self._process is None, "already running"
        self._announced.clear()
        reading, writing = os.pipe()
        try:
            self._process = self._begin(writing)
        finally:
            os.close(writing)
        output = os.fdopen(reading, encoding="utf-8", errors="replace")
        self._reader = threading.Thread(target=self._collect, args=(output,), daemon=True)
        self._reader.start()
        if ready:
            self.wait_ready()
        return self

    def arguments(self) -> list[str]:
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        return ["serve", *flags, *self.args]

    def wait_ready(self, timeout_s: float = START_S_MAX) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._announced.wait(0.02):
            self._fail_if_gone("ended before it was ready")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(f"not ready after {timeout_s} s\n{self.log}")
        while self.status("/readyz") != 200:
            self._fail_if_gone("ended before /readyz answered 200")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(f"/readyz is not 200 after {timeout_s} s\n{self.log}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL: what a crash or the out-of-memory killer does."""
        if self._process is not None:
            self._process.kill()
            self._finish(STOP_S_MAX)

    def stop(self) -> None:
        """SIGTERM; the server must drain and leave with 0."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        code = self._finish(STOP_S_MAX)
        if code != 0:
            raise ServerFailedError(f"exit code {code} after SIGTERM\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def restart(self, *, kill: bool = False) -> None:
        """End the process (gently, or not) and start it again on the same port and directory."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def wait_exit(self, timeout_s: float = STOP_S_MAX) -> int:
        """Wait for a process that ends by itself; its exit code."""
        assert self._process is not None
        return self._finish(timeout_s)

    # Looking at it.

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What the process printed, all its lives, newest last."""
        return "".join(self._lines)

    def status(self, path: str, method: str = "GET") -> int | None:
        """The status of one request, or None while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    # Inside.

    def _environment(self) -> dict[str, str]:
        # Settings of whoever runs the tests must not reach the server under test.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
        # Only tests about it want a server that writes something by itself, or starts a pipeline.
        quiet = {"TAILRACE_METRICS_FLUSH_MS": "0", "TAILRACE_PIPELINE": "off"}
        return {**kept, "PYTHONUNBUFFERED": "1", **quiet, **({} if self.plain else HURRY), **self.env}

    def _directory(self) -> Path:
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        return self.data_dir.parent

    def _begin(self, output: int) -> subprocess.Popen[bytes] | ForkedCommand:
        arguments, env, cwd = self.arguments(), self._environment(), self._directory()
        if self.plain:
            return subprocess.Popen(
                [sys.executable, "-m", "tailrace", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        with Path(os.devnull).open("rb") as nothing:
            return ForkedCommand(arguments, env=env, cwd=cwd, streams=(nothing.fileno(), output, output))

    def _collect(self, output: TextIO) -> None:
        for line in output:
            self._lines.append(line)
            if (match := _READY.search(line)) and not self._announced.is_set():
                self.base_url = match[1].rstrip("/")
                self.port = int(self.base_url.rsplit(":", 1)[1])
                self._announced.set()
        output.close()

    def _fail_if_gone(self, what: str) -> None:
        if not self.running:
            code = self._finish(STOP_S_MAX)
            raise ServerFailedError(f"{what} (exit code {code})\n{self.log}")

    def _finish(self, timeout_s: float) -> int:
        process, reader = self._process, self._reader
        assert process is not None
        assert reader is not None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ServerFailedError(
                f"still running {timeout_s} s after it was told to end\n{self.log}"
            ) from None
        finally:
            reader.join(timeout=5)
            self._process = None
        return code
