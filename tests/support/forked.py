"""`tailrace` commands without the wait for their modules: forked off a process that has loaded them.

To load a server takes most of the time of its start, and tests start more than a thousand of them. A forked
one is the same program with the same arguments, variables and files; only the interpreter is not a fresh one.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.loaded import MESSAGE_BYTES_MAX, NUMBER

TEMPLATE = Path(__file__).with_name("loaded.py")


class Template:
    """A process that forks, started when it is first needed."""

    def __init__(self, preloaded: str) -> None:
        self._preloaded = preloaded
        self._starting = threading.Lock()
        self._socket: socket.socket | None = None

    def ask(self, message: bytes, descriptors: Sequence[int]) -> None:
        assert len(message) <= MESSAGE_BYTES_MAX
        with self._starting:
            if self._socket is None:
                self._socket = self._start()
        socket.send_fds(self._socket, [message], descriptors)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            [sys.executable, "-P", str(TEMPLATE), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONUNBUFFERED": "1", "LD_PRELOAD": self._preloaded},
            start_new_session=True,
        )
        theirs.close()

        def end() -> None:
            ours.close()
            process.wait()

        atexit.register(end)
        return ours


_templates: dict[str, Template] = {}  # by what the loader puts under them


class ForkedCommand:
    """One `tailrace` command. Offers what tests need of `subprocess.Popen`, and means the same by it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        streams: tuple[int, int, int],
    ) -> None:
        self.arguments = list(arguments)
        self.returncode: int | None = None
        self._looking = threading.Lock()
        told, tells = os.pipe()
        command = (self.arguments, dict(env), str(cwd))
        template = _templates.setdefault(env.get("LD_PRELOAD", ""), Template(env.get("LD_PRELOAD", "")))
        template.ask(json.dumps(command).encode(), [*streams, tells])
        os.close(tells)
        self._told = told
        self.pid = self._hear()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with self._looking:
            if self.returncode is None and self._is_told(0):
                self.returncode = self._hear()
                os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._is_told(timeout):
            raise subprocess.TimeoutExpired(self.arguments, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and we are about to be told
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _is_told(self, timeout_s: float | None) -> bool:
        events = select.poll()
        events.register(self._told, select.POLLIN)
        return bool(events.poll(None if timeout_s is None else timeout_s * 1000))

    def _hear(self) -> int:
        raw = os.read(self._told, NUMBER.size)
        assert raw, "the process that forks has ended; its error output says why"
        return NUMBER.unpack(raw)[0]
