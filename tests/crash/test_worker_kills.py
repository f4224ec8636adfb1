"""A worker is killed while others serve: nothing acknowledged is lost or doubled, and it comes back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from crash.station import eventually
from crash.wire import JSON, Content, LostError, Wire
from support.server import ServerProcess
from support.workers import names_of, pid_of

WORKERS = 2
KILLS = 3


class Writer(threading.Thread):
    """A producer that repeats what it got no answer to; a number is written once."""

    def __init__(self, port: int, name: str) -> None:
        super().__init__(daemon=True)
        self.name = name
        self.acknowledged = 0
        self.refusals = 0
        self.ending = threading.Event()
        self._wire = Wire(port)
        self.failure: object = None

    def run(self) -> None:
        while not self.ending.is_set():
            self._append()
        self._wire.close()

    def _append(self) -> None:
        producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(self.acknowledged)}
        body = orjson.dumps(self.acknowledged)
        while True:
            try:
                answer = self._wire.send("POST", self.name, body, {**JSON, **producer})
            except LostError:
                self.refusals += 1
                continue
            if answer.ok:
                self.acknowledged += 1
                return
            self.refusals += 1
            if answer.status != 503:
                self.failure = answer
                self.ending.set()
                return


@pytest.fixture
def server(tmp_path: Path) -> ServerProcess:
    return ServerProcess(tmp_path / "data", args=("--workers", str(WORKERS))).start()


def test_a_killed_worker_comes_back_with_all_it_acknowledged(server: ServerProcess) -> None:
    names = [
        name
        for worker in range(WORKERS)
        for name, _ in zip(names_of(worker, WORKERS), range(2), strict=False)
    ]
    wire = Wire(server.port)
    for name in names:
        assert wire.send("PUT", name, headers=JSON).status == 201
    wire.close()
    writers = [Writer(server.port, name) for name in names]
    for writer in writers:
        writer.start()
    for kill in range(KILLS):
        victim = kill % WORKERS
        before = [writer.acknowledged for writer in writers]
        eventually(
            lambda before=before: all(w.acknowledged > n + 20 for w, n in zip(writers, before, strict=True)),
            "all writers get on",
        )
        pid = pid_of(server, victim)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        others = [writer for index, writer in enumerate(writers) if index // 2 != victim]
        marks = [writer.acknowledged for writer in others]
        eventually(
            lambda others=others, marks=marks: all(
                w.acknowledged > n + 20 for w, n in zip(others, marks, strict=True)
            ),
            "the streams of other workers are served",
        )
        eventually(lambda v=victim, p=pid: pid_of(server, v) not in (None, p), "it is started again")
    marks = [writer.acknowledged for writer in writers]
    eventually(
        lambda: all(w.acknowledged > n + 20 for w, n in zip(writers, marks, strict=True)), "all get on again"
    )
    for writer in writers:
        writer.ending.set()
        writer.join(60)
        assert writer.failure is None
    wire = Wire(server.port)
    for writer in writers:
        content = wire.read_all(writer.name)
        assert isinstance(content, Content)
        assert content.entries == [b"%d" % number for number in range(writer.acknowledged)]
    wire.close()
    eventually(lambda: server.status("/readyz") == 200, "all are ready")
    server.stop()


class Forker(threading.Thread):
    """Makes one fork after the other, each until it is there."""

    def __init__(self, port: int, sources: list[str]) -> None:
        super().__init__(daemon=True)
        self._sources = sources
        self._wire = Wire(port)
        self.made: list[str] = []
        self.ending = threading.Event()
        self.failures: list[object] = []

    def run(self) -> None:
        while not (self.ending.is_set() or self.failures):
            self._make(f"fork/{len(self.made)}", self._sources[len(self.made) % len(self._sources)])
        self._wire.close()

    def _make(self, name: str, source: str) -> None:
        while True:
            try:
                answer = self._wire.send("PUT", name, headers={"Stream-Forked-From": f"/v1/stream/{source}"})
            except LostError:
                continue
            if answer.ok:
                self.made.append(name)
                return
            if answer.status != 503:
                self.failures.append(answer)
                return


def test_every_fork_is_told_once_whoever_is_killed(server: ServerProcess) -> None:
    wire = Wire(server.port)
    sources = [next(names_of(worker, WORKERS, "source/")) for worker in range(WORKERS)]
    for name in sources:
        assert wire.send("PUT", name, b"[1]", JSON).status == 201
    wire.close()
    forker = Forker(server.port, sources)
    forker.start()
    for kill in range(KILLS):
        mark = len(forker.made)
        eventually(lambda mark=mark: len(forker.made) > mark + 10, "forks are made")
        victim = kill % WORKERS
        pid = pid_of(server, victim)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda v=victim, p=pid: pid_of(server, v) not in (None, p), "it is started again")
    mark = len(forker.made)
    eventually(lambda: len(forker.made) > mark + 10, "forks are made again")
    forker.ending.set()
    forker.join(60)
    assert not forker.failures

    def told() -> list[str]:
        content = wire.read_all("__registry__")
        assert isinstance(content, Content)
        events: list[dict[str, Any]] = [orjson.loads(entry) for entry in content.entries]
        return sorted(event["key"] for event in events if event["headers"].get("operation") == "insert")

    eventually(lambda: set(told()) >= set(forker.made), "all forks are told")
    assert told() == sorted([*sources, *forker.made])
    wire.close()
    server.stop()


def test_without_its_supervisor_a_worker_ends(server: ServerProcess) -> None:
    pids = [pid_of(server, worker) for worker in range(WORKERS)]
    wire = Wire(server.port)
    assert wire.send("PUT", "kept", b"[1,2]", JSON).status == 201
    wire.close()
    server.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the workers are gone")
    server.start()
    wire = Wire(server.port)
    content = wire.read_all("kept")
    assert isinstance(content, Content)
    assert content.entries == [b"1", b"2"]
    wire.close()
    server.stop()
