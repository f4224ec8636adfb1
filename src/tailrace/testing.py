"""A real server process for tests: started with the command line, stopped with signals.

`pytest_plugin.py` has pytest fixtures that use it.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from tailrace.client import Client

LOG_LINES_MAX: Final = 5000
PAUSE_S: Final = 0.01
# A test server writes no metrics, starts no Java, and is one process on any machine.
QUIET: Final = {"TAILRACE_METRICS_FLUSH_MS": "0", "TAILRACE_PIPELINE": "off", "TAILRACE_WORKERS": "1"}
_READY: Final = re.compile(r"tailrace ready\s+(https?://\S+)")


class ServerFailedError(AssertionError):
    """The process failed; the message contains its log."""


class Process(Protocol):
    """A running command; `subprocess.Popen` implements it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: signal.Signals, /) -> None: ...
    def kill(self) -> None: ...


class TailraceServer:
    """One ``tailrace serve`` process. Its port stays the same over restarts, so that clients can reconnect.

    with TailraceServer(tmp_path / "data", settings={"append_body_bytes": "1MiB"}) as server:
        with server.client() as client:
            ...
    """

    start_s_max: float = 30.0
    stop_s_max: float = 20.0

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        settings: Mapping[str, object] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.port = port
        self.args = tuple(args)
        self.env = {f"TAILRACE_{name.upper()}": str(value) for name, value in (settings or {}).items()}
        self.env |= env or {}
        self.base_url = ""
        self._process: Process | None = None
        self._lines: deque[str] = deque(maxlen=LOG_LINES_MAX)
        self._announced = threading.Event()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- command ---------------------------------------------------------------------------------------

    def arguments(self) -> list[str]:
        """The arguments after `tailrace` on the command line."""
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        return ["serve", *flags, *self.args]

    def environment(self) -> dict[str, str]:
        """Without the settings of the shell that runs the tests."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
        return {**inherited, "PYTHONUNBUFFERED": "1", **QUIET, **self.env}

    def launch(self, cwd: Path, output: int) -> Process:
        """Start the process with its output on this descriptor."""
        return subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "tailrace", *self.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=self.environment(),
            cwd=cwd,
            start_new_session=True,
        )

    # -- lifecycle -------------------------------------------------------------------------------------

    def start(self, *, ready: bool = True) -> Self:
        """Start the process and wait until it serves. With ``ready=False`` only start it."""
        assert self._process is None, "already running"
        self._announced.clear()
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb"):
            output = os.fdopen(reading, encoding="utf-8", errors="replace")
            try:
                self._process = self.launch(self.data_dir.parent, writing)
            except BaseException:
                output.close()
                raise
        self._reader = threading.Thread(target=self._collect, args=(output,), daemon=True)
        self._reader.start()
        if ready:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float | None = None) -> None:
        patience_s = self.start_s_max if timeout_s is None else timeout_s
        deadline = time.monotonic() + patience_s
        while not self._announced.wait(PAUSE_S):
            self._fail_if_exited("exited before it was ready")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(f"not ready after {patience_s} s\n{self.log}")
        while self.status("/readyz") != 200:
            self._fail_if_exited("exited before /readyz returned 200")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(f"/readyz is not 200 after {patience_s} s\n{self.log}")
            time.sleep(PAUSE_S)

    def kill(self) -> None:
        """SIGKILL, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._finish(self.stop_s_max)

    def stop(self) -> None:
        """SIGTERM; the server must drain and exit with 0."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        code = self._finish(self.stop_s_max)
        if code != 0:
            raise ServerFailedError(f"exit code {code} after SIGTERM\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def restart(self, *, kill: bool = False) -> None:
        """Stop or kill the process and start it again on the same port and directory."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def wait_exit(self, timeout_s: float | None = None) -> int:
        """Wait for a process that exits by itself; returns its exit code."""
        assert self._process is not None
        return self._finish(self.stop_s_max if timeout_s is None else timeout_s)

    # -- access ----------------------------------------------------------------------------------------

    def client(self) -> Client:
        """A new client of this server; close it, or use it in a ``with`` statement."""
        from tailrace.client import Client

        return Client(self.base_url)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The output of the process, including earlier runs, newest last."""
        return "".join(self._lines)

    def status(self, path: str, method: str = "GET") -> int | None:
        """The status of one request, or None if there is no response."""
        if self.base_url.startswith("https:"):
            # Tests use certificates of any kind.
            trusting = ssl.create_default_context()
            trusting.check_hostname = False
            trusting.verify_mode = ssl.CERT_NONE
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=trusting)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    # -- internal --------------------------------------------------------------------------------------

    def _collect(self, output: TextIO) -> None:
        with output:
            for line in output:
                announced = _READY.search(line)
                if announced and not self._announced.is_set():
                    # Before the line becomes visible: readers of the log expect the address to be set.
                    self.base_url = announced[1].rstrip("/")
                    self.port = int(self.base_url.rsplit(":", 1)[1])
                self._lines.append(line)
                if announced:
                    self._announced.set()

    def _fail_if_exited(self, what: str) -> None:
        if not self.running:
            code = self._finish(self.stop_s_max)
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
            raise ServerFailedError(f"still running {timeout_s} s after the signal\n{self.log}") from None
        finally:
            reader.join(timeout=5)
            self._process = None
        return code
