# pyright: strict
"""Single appends at a steady rate, beside whatever else the server does."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import orjson

from bench.evlog.events import block_of
from bench.evlog.measure import percentile_ms
from bench.processes import PeerError
from tailrace import turns

STREAM = "probe"
WRITERS = 4
RATE_PER_S = 50.0  # of each writer: far from what a server can take, so that waiting is not its own doing

# A writer elsewhere would not share its cores with Spark: it is the server's waiting that is measured.
TURN_US = 100


class Appends:
    """Runs while it is entered; `p50_ms` and `p99_ms` are of the time from sending to the acknowledgement."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ended = threading.Event()
        self._taken: list[list[float]] = [[] for _ in range(WRITERS)]
        self._failed: list[str] = []
        self._threads = [
            threading.Thread(target=self._write, args=(one,), daemon=True) for one in self._taken
        ]

    def __enter__(self) -> Self:
        _create(self._port)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._failed and error is None:
            raise PeerError(f"an append failed: {self._failed[0]}")

    @property
    def seconds(self) -> Sequence[float]:
        return [one for taken in self._taken for one in taken]

    def figures(self) -> dict[str, float]:
        seconds = self.seconds
        return {
            "appends": len(seconds),
            "p50_ms": percentile_ms(seconds, 0.5),
            "p99_ms": percentile_ms(seconds, 0.99),
            "max_ms": percentile_ms(seconds, 1.0),
        }

    def _write(self, taken: list[float]) -> None:
        turns.ask_for(TURN_US)
        body = orjson.dumps(block_of(98, 0, 0.0)[0])
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        due = time.perf_counter()
        while not self._ended.wait(max(0.0, due - time.perf_counter())):
            begun = time.perf_counter()
            try:
                status = _post(connection, "POST", body)
            except (OSError, http.client.HTTPException) as error:
                self._failed.append(str(error))
                return
            if status != 204:
                self._failed.append(f"status {status}")
                return
            taken.append(time.perf_counter() - begun)
            # What was missed is not made up for: the rate is a bound.
            due = max(due + 1 / RATE_PER_S, begun)
        connection.close()


def _create(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    _post(connection, "PUT", None)
    connection.close()


def _post(connection: http.client.HTTPConnection, method: str, body: bytes | None) -> int:
    connection.request(method, f"/v1/stream/{STREAM}", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status
