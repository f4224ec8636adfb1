"""A worker that cannot be started is tried again: nobody else would."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from support.http_app import until
from tailrace.cluster import supervisor
from tailrace.cluster.layout import Layout
from tailrace.cluster.supervisor import Supervisor, WorkerHandle
from tailrace.common.settings import Settings
from tailrace.storage.data_directory import DataDirectory

# Stands for a worker: it says that it is ready, and ends when it is told to.
CHILD = """
import sys
sys.stdin.readline()
print("ready http://here", flush=True)
for line in sys.stdin:
    print("drained" if line == "drain\\n" else "", flush=True)
    if line == "stop\\n":
        break
    if line == "die\\n":
        sys.exit(3)
"""


class Processes:
    """Starts a stand-in, or fails as a machine that has nothing left does."""

    def __init__(self) -> None:
        self.failures = 0
        self.asked = 0
        self.begun = asyncio.Event()
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self._start = asyncio.create_subprocess_exec

    async def start(self, *_: str, **how: Any) -> asyncio.subprocess.Process:
        self.asked += 1
        self.begun.set()
        await self.may_begin.wait()
        if self.failures:
            self.failures -= 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await self._start(sys.executable, "-c", CHILD, **how)


@pytest.fixture
def root(tmp_path: Path) -> DataDirectory:
    return DataDirectory(tmp_path / "data")


def supervised(root: DataDirectory) -> tuple[Supervisor, WorkerHandle]:
    with socket.create_server(("127.0.0.1", 0)) as port:
        made = Supervisor(Settings(data_dir=root.path), root, Layout(workers=1), port)
    return made, WorkerHandle(made, 0)


def test_a_worker_that_cannot_be_started_is_tried_again(
    root: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        processes = Processes()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", processes.start)
        monkeypatch.setattr(supervisor, "RESTART_S", 0.001)
        of_all, worker = supervised(root)
        life = asyncio.create_task(worker.run())
        await worker.ready.wait()
        processes.failures = 2
        worker.send_command(b"die\n")
        await until(lambda: processes.asked == 4 and worker.process is not None)
        assert not life.done()
        of_all.stopping.set()
        worker.drain()
        await worker.drained.wait()
        worker.send_command(b"stop\n")
        await life
        assert not worker.failed

    asyncio.run(main())


def test_a_server_that_cannot_start_any_worker_says_so(
    root: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        processes = Processes()
        processes.failures = 1
        monkeypatch.setattr(asyncio, "create_subprocess_exec", processes.start)
        of_all, worker = supervised(root)
        await worker.run()
        assert worker.failed
        assert of_all.stopping.is_set()

    asyncio.run(main())


def test_a_worker_that_is_just_being_started_is_told_to_stop(
    root: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        processes = Processes()
        processes.may_begin.clear()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", processes.start)
        of_all, worker = supervised(root)
        life = asyncio.create_task(worker.run())
        await processes.begun.wait()
        of_all.stopping.set()
        worker.drain()
        processes.may_begin.set()
        await worker.drained.wait()
        worker.send_command(b"stop\n")
        await life

    asyncio.run(main())
