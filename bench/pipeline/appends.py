# pyright: strict
"""Single appends at a steady rate, beside whatever else the server does.

`python -m bench.pipeline.appends PORT` appends until its standard input ends, and prints how long that took.
It is a process of its own, since who measures memory and asks for progress would be in its way.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Self

import msgspec
import orjson

from bench.evlog.events import block_of
from bench.evlog.measure import percentile_ms
from bench.places import ROOT
from bench.processes import PeerError
from tailrace.common import process

STREAM = "probe"
WRITERS = 4
RATE_PER_S = 50.0  # of each writer: far from what a server can take, so that waiting is not its own doing
# A writer elsewhere would not share its cores with Spark: it is the server's waiting that is measured.
TURN_US = 100
SWITCH_INTERVAL_S = 0.0005
END_S_MAX = 60.0


class Appends:
    """Runs while it is entered; `p50_ms` and `p99_ms` are of the time from sending to the acknowledgement."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.figures: dict[str, float] = {}

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.pipeline.appends", str(self._port)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        told, _ = self._process.communicate(timeout=END_S_MAX)
        if error is None and self._process.returncode != 0:
            raise PeerError(f"an append failed: {told.decode().strip()}")
        if error is None:
            self.figures = msgspec.json.decode(told, type=dict[str, float])


def main(port: int) -> int:
    process.set_time_slice(TURN_US)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _create(port)
    ended, failed = threading.Event(), list[str]()
    taken: list[list[float]] = [[] for _ in range(WRITERS)]
    threads = [threading.Thread(target=_write, args=(port, ended, one, failed)) for one in taken]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    if failed:
        print(failed[0])
        return 1
    print(msgspec.json.encode(_figures([one for seconds in taken for one in seconds])).decode())
    return 0


def _figures(seconds: list[float]) -> dict[str, float]:
    return {
        "appends": len(seconds),
        "p50_ms": percentile_ms(seconds, 0.5),
        "p99_ms": percentile_ms(seconds, 0.99),
        "max_ms": percentile_ms(seconds, 1.0),
    }


def _write(port: int, ended: threading.Event, taken: list[float], failed: list[str]) -> None:
    body = orjson.dumps(block_of(98, 0, 0.0)[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    due = time.perf_counter()
    while not ended.wait(max(0.0, due - time.perf_counter())):
        begun = time.perf_counter()
        try:
            status = _send(connection, "POST", body)
        except (OSError, http.client.HTTPException) as error:
            failed.append(str(error))
            return
        if status != 204:
            failed.append(f"status {status}")
            return
        taken.append(time.perf_counter() - begun)
        # What was missed is not made up for: the rate is a bound.
        due = max(due + 1 / RATE_PER_S, begun)
    connection.close()


def _create(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    _send(connection, "PUT", None)
    connection.close()


def _send(connection: http.client.HTTPConnection, method: str, body: bytes | None) -> int:
    connection.request(method, f"/v1/stream/{STREAM}", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
