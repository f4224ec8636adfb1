"""A standalone Spark cluster on loopback: one master and two workers, each a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from support.server import free_port

START_S_MAX = 120.0
_CLASS = "org.apache.spark.deploy"


class SparkCluster:
    """Workers run in directories of their own and know no module path: all they have is what is installed."""

    def __init__(self, directory: Path, *, env: dict[str, str] | None = None, workers: int = 2) -> None:
        self._directory = directory
        self._workers = workers
        self._env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._env |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m", **(env or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._start(
            "master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(free_port())
        )
        self._wait("master", r"New state: ALIVE", 1)
        for number in range(self._workers):
            name = f"worker{number}"
            work = str(self._directory / f"{name}-work")
            ports = ["--host", "127.0.0.1", "--webui-port", str(free_port())]
            self._start(name, self.master, "--cores", "1", "--memory", "1g", "--work-dir", work, *ports)
        self._wait("master", r"Registering worker", self._workers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, *arguments: str) -> None:
        home = self._directory / name
        home.mkdir(parents=True)
        launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
        kind = "master.Master" if name == "master" else "worker.Worker"
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(launcher), f"{_CLASS}.{kind}", *arguments],
                    cwd=home,
                    env=self._env | {"PYSPARK_PYTHON": sys.executable},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _wait(self, name: str, pattern: str, times: int) -> None:
        deadline = time.monotonic() + START_S_MAX
        while len(re.findall(pattern, self.log(name))) < times:
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.2)
