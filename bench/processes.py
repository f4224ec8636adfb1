# pyright: strict
"""Child processes: started on chosen cores, watched until ready, measured, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class PeerError(Exception):
    """A peer did not start, or did not do what a scenario asked of it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(argv: Sequence[str], cpus: frozenset[int] | None) -> list[str]:
    """The same command, on these cores only."""
    if cpus is None:
        return list(argv)
    return ["taskset", "-c", ",".join(map(str, sorted(cpus))), *argv]


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        parents.setdefault(parent, []).append(int(entry.name))
    found, queue = [pid], [pid]
    while queue:
        for child in parents.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def rss_bytes(pid: int) -> int:
    """Of one process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def tree_rss_bytes(pid: int) -> int:
    """Of a process and all that it started."""
    return sum(map(rss_bytes, descendants(pid)))


def tree_cpu_seconds(pid: int) -> float:
    """Of a process and all that it started and that still run."""
    ticks = 0
    for one in descendants(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


@dataclass(slots=True)
class Running:
    """One started server."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    ready_seconds: float = 0.0
    stopped: bool = field(default=False)

    def rss_bytes(self) -> int:
        return tree_rss_bytes(self.process.pid)

    def cpu_seconds(self) -> float:
        return tree_cpu_seconds(self.process.pid)

    def cpu_seconds_of(self, word: str) -> float:
        """Of those children, the server itself left out, that were started with this word."""
        ticks = 0
        for pid in descendants(self.process.pid)[1:]:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if word in command:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS_PER_S

    def stop(self, how: signal.Signals = signal.SIGTERM, patience_s: float = 20.0) -> float:
        """Seconds it took to go."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.stopped = True
        return time.monotonic() - began

    def log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


class Peak:
    """The most memory that a server had while something ran: its first process, and with all it started."""

    def __init__(self, server: Running, *, alone: bool = False) -> None:
        """`alone` leaves out what it started: to find that takes time, which the server may need."""
        self.bytes = 0
        self.all_bytes = 0
        self._server = server
        self._alone = alone
        self._pause_s = 0.02 if alone else 0.1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._pause_s):
            self.bytes = max(self.bytes, rss_bytes(self._server.process.pid))
            if not self._alone:
                self.all_bytes = max(self.all_bytes, self._server.rss_bytes())


def _answers(port: int, ready: str) -> bool:
    """`ready`: an HTTP path that must answer 200, "PING" for Redis (it accepts while loading), or nothing."""
    if ready.startswith("/"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
    with socket.socket() as probe:
        probe.settimeout(2.0)
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return False
        if ready == "PING":
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
    return True


def launch(
    argv: Sequence[str],
    env: Mapping[str, str],
    port: int,
    ready: str,
    log_path: Path,
    cpus: frozenset[int] | None,
    patience_s: float = 30.0,
) -> Running:
    """Start a server and wait until it answers."""
    began = time.monotonic()
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            pinned(argv, cpus),
            env={**os.environ, **env},
            stdout=log,
            stderr=log,
            cwd=log_path.parent,
        )
    running = Running(process, port, log_path)
    while not _answers(port, ready):
        if process.poll() is not None:
            raise PeerError(f"exited with {process.returncode}: {running.log_tail()}")
        if time.monotonic() - began > patience_s:
            running.stop(signal.SIGKILL)
            raise PeerError(f"not ready after {patience_s:.0f} s: {running.log_tail()}")
        time.sleep(0.01)
    running.ready_seconds = time.monotonic() - began
    return running
