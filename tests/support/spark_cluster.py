"""Spark outside local mode, on loopback: a standalone cluster, and a Connect server."""

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

from support.ports import free_port

START_S_MAX = 300.0
_CLASS = "org.apache.spark.deploy"
_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
_HOME = Path(pyspark.__file__).parent


class Processes:
    """Java processes of Spark, each in a directory of its own, with a log that tells when it is up."""

    def __init__(self, directory: Path, env: dict[str, str] | None) -> None:
        self._directory = directory
        self._env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._env |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m", **(env or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()

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

    def _start(self, name: str, tool: str, *arguments: str) -> None:
        home = self._directory / name
        home.mkdir(parents=True)
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(_HOME / "bin" / tool), *arguments],
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


class SparkCluster(Processes):
    """One master and two workers, which know no module path: all they have is what is installed."""

    def __init__(self, directory: Path, *, env: dict[str, str] | None = None, workers: int = 2) -> None:
        super().__init__(directory, env)
        self._workers = workers

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        listen = ["--host", "127.0.0.1", "--webui-port"]
        self._start(
            *("master", "spark-class", f"{_CLASS}.master.Master", "--port", str(self.port)),
            *(*listen, str(free_port())),
        )
        self._wait("master", r"New state: ALIVE", 1)
        for number in range(self._workers):
            name = f"worker{number}"
            work = str(self._directory / f"{name}-work")
            self._start(
                *(name, "spark-class", f"{_CLASS}.worker.Worker", self.master, "--cores", "1"),
                *("--memory", "1g", "--work-dir", work, *listen, str(free_port())),
            )
        self._wait("master", r"Registering worker", self._workers)
        return self


class ConnectServer(Processes):
    """Spark with two cores behind a port for clients that have no Java."""

    def __init__(self, directory: Path, *, env: dict[str, str] | None = None) -> None:
        super().__init__(directory, {"SPARK_DAEMON_MEMORY": "1g", **(env or {})})

    @property
    def master(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
        }
        flags = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        self._start(
            *("connect", "spark-submit", "--master", "local[2]", "--class", _CONNECT),
            *(*flags, "spark-internal"),
        )
        self._wait("connect", r"Spark Connect server started", 1)
        return self
