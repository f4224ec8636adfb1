"""A worker is killed while others serve: nothing acknowledged is lost or doubled, and it comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import orjson
import pytest

from crash.station import eventually
from crash.wire import JSON, Content, LostError, Wire
from support.server import ServerProcess
from support.workers import names_of, pid_of

WORKERS = 2
KILLS = 3


class Client(threading.Thread):
    """Asks one thing after the other, each until it is done, as long as it is started with `with`."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.ending = threading.Event()  # what it is at is still done
        self.given_up = threading.Event()
        self.wire = Wire(port)
        self.failure: object = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self.ending.set()
        if failure is not None:
            self.given_up.set()
        self.join(60)

    def run(self) -> None:
        while not self.ending.is_set():
            self.work()
        self.wire.close()

    def work(self) -> None:
        raise AssertionError("every kind of client has its own")


class Writer(Client):
    """A producer that repeats what it got no answer to; a number is written once."""

    def __init__(self, port: int, name: str) -> None:
        super().__init__(port)
        self.name = name
        self.acknowledged = 0
        self.refusals = 0

    def work(self) -> None:
        producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(self.acknowledged)}
        body = orjson.dumps(self.acknowledged)
        while not self.given_up.is_set():
            try:
                answer = self.wire.send("POST", self.name, body, {**JSON, **producer})
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
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "data", args=("--workers", str(WORKERS))).start()
    yield process
    process.kill()


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
    with ExitStack() as working:
        for writer in writers:
            working.enter_context(writer)
        for kill in range(KILLS):
            _await_progress(writers, "all writers get on")
            victim = kill % WORKERS
            pid = _kill(server, victim)
            others = [writer for index, writer in enumerate(writers) if index // 2 != victim]
            _await_progress(others, "the streams of other workers are served")
            eventually(lambda v=victim, p=pid: pid_of(server, v) not in (None, p), "it is started again")
        _await_progress(writers, "all get on again")
    assert not [writer.failure for writer in writers if writer.failure is not None]
    wire = Wire(server.port)
    for writer in writers:
        content = wire.read_all(writer.name)
        assert isinstance(content, Content)
        assert content.entries == [b"%d" % number for number in range(writer.acknowledged)]
    wire.close()
    eventually(lambda: server.status("/readyz") == 200, "all are ready")
    server.stop()


def _await_progress(writers: list[Writer], what: str) -> None:
    marks = [writer.acknowledged for writer in writers]
    eventually(
        lambda: all(writer.acknowledged > mark + 20 for writer, mark in zip(writers, marks, strict=True)),
        what,
    )


def _kill(server: ServerProcess, victim: int) -> int:
    pid = pid_of(server, victim)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


class Forker(Client):
    """Makes one fork after the other, each until it is there."""

    def __init__(self, port: int, sources: list[str]) -> None:
        super().__init__(port)
        self._sources = sources
        self.made: list[str] = []

    def work(self) -> None:
        name, source = f"fork/{len(self.made)}", self._sources[len(self.made) % len(self._sources)]
        while not self.given_up.is_set():
            try:
                answer = self.wire.send("PUT", name, headers={"Stream-Forked-From": f"/v1/stream/{source}"})
            except LostError:
                continue
            if answer.ok:
                self.made.append(name)
                return
            if answer.status != 503:
                self.failure = answer
                self.ending.set()
                return


def test_every_fork_is_told_once_whoever_is_killed(server: ServerProcess) -> None:
    wire = Wire(server.port)
    sources = [next(names_of(worker, WORKERS, "source/")) for worker in range(WORKERS)]
    for name in sources:
        assert wire.send("PUT", name, b"[1]", JSON).status == 201
    wire.close()
    with Forker(server.port, sources) as forker:
        for kill in range(KILLS):
            _await_forks(forker, "forks are made")
            victim = kill % WORKERS
            pid = _kill(server, victim)
            eventually(lambda v=victim, p=pid: pid_of(server, v) not in (None, p), "it is started again")
        _await_forks(forker, "forks are made again")
    assert forker.failure is None

    def told() -> list[str]:
        content = wire.read_all("__registry__")
        assert isinstance(content, Content)
        events: list[dict[str, Any]] = [orjson.loads(entry) for entry in content.entries]
        return sorted(event["key"] for event in events if event["headers"].get("operation") == "insert")

    eventually(lambda: set(told()) >= set(forker.made), "all forks are told")
    assert told() == sorted([*sources, *forker.made])
    wire.close()
    server.stop()


def _await_forks(forker: Forker, what: str) -> None:
    mark = len(forker.made)
    eventually(lambda: forker.failure is not None or len(forker.made) > mark + 10, what)


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
