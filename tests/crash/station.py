"""A server on a faulty disk and one stream of numbered lines, for tests that look at a single fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from crash.faults import Disk
from crash.wire import TEXT, Answer, Content, LostError, Wire
from crash.world import World
from support.server import ServerProcess

WAIT_S_MAX = 60.0
DiskType = TypeVar("DiskType", bound=Disk | World)


def eventually(condition: Callable[[], object], what: str) -> None:
    """Waits for a condition, looking often."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline, f"it never came true that {what}"
        time.sleep(0.02)


class Station(Generic[DiskType]):
    """Remembers what was acknowledged."""

    def __init__(
        self, directory: Path, disk: DiskType, *args: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.disk = disk
        self.server = ServerProcess(directory / "data", args=args, env={**disk.env, **(env or {})})
        self.acknowledged: list[bytes] = []
        self._sent = 0
        self._wire: Wire | None = None

    @property
    def data_dir(self) -> Path:
        return self.server.data_dir

    @property
    def journal_files(self) -> list[Path]:
        return sorted((self.data_dir / "journal").glob("*.jnl"))

    def start(self) -> Station:
        self.server.start()
        assert self.send("PUT", "lines", headers=TEXT).status in (200, 201)
        return self

    def kill(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self.server.kill()

    def stop_dead(self) -> None:
        """The process is killed, and whatever ailed the disk is mended."""
        self.kill()
        if isinstance(self.disk, Disk):
            self.disk.heal()

    @property
    def wire(self) -> Wire:
        if self._wire is None:
            self._wire = Wire(self.server.port)
        return self._wire

    def send(
        self, method: str, name: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        return self.wire.send(method, name, body, headers)

    def metric(self, name: str) -> float:
        """One value of /metrics, by the beginning of its line."""
        text = self.wire.send_path("GET", "/metrics").body.decode()
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)]
        assert len(values) == 1, values
        return float(values[0])

    def line(self, size: int = 0) -> bytes:
        self._sent += 1
        return f"line {self._sent} {'z' * size}\n".encode()

    def append(self, size: int = 0) -> Answer:
        """One append; what is acknowledged is entered into the books, at the place the server said."""
        body = self.line(size)
        answer = self.wire.send("POST", "lines", body, TEXT)
        if answer.ok:
            self.acknowledged.append(body)
            assert answer.entry == len(self.acknowledged), "it took a place that is not its own"
        return answer

    def append_many(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            answer = self.append(size)
            assert answer.status == 204, answer

    def append_until_accepted(self, size: int = 0) -> None:
        eventually(lambda: self.append(size).ok, "appends are accepted again")

    def check(self) -> None:
        """Reads show exactly what was acknowledged."""
        content = self.wire.read_all("lines")
        assert isinstance(content, Content), content
        assert content.entries == self.acknowledged

    def crash_and_check(self) -> None:
        self.stop_dead()
        self.server.start()
        self.check()

    def in_background(self, method: str, name: str, body: bytes = b"", query: str = "") -> Background:
        return Background(Wire(self.server.port), method, name, body, query)


class Background:
    """A request that waits for its answer while the test does something else."""

    def __init__(self, wire: Wire, method: str, name: str, body: bytes, query: str) -> None:
        self.answer: Answer | None = None
        self._wire = wire
        self._request = (method, name, body, TEXT if body else None, query)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            self.answer = self._wire.send(*self._request)
        except LostError:
            self.answer = None
        finally:
            self._wire.close()

    @property
    def answered(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Answer | None:
        """The answer, or None if the server died first."""
        self._thread.join(WAIT_S_MAX)
        assert not self._thread.is_alive(), "no answer came"
        return self.answer
