"""Long-polls that wait while a test goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from support.calls import eventually
from support.wire import Answer, Wire


class Waiting:
    """Requests that wait for something, each on a connection of its own."""

    def __init__(self, http: Wire) -> None:
        self._http = http
        self._threads = ThreadPoolExecutor(8)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def get(self, path: str) -> Future[Answer]:
        """Returns when the server has the request, as its count of live readers shows."""
        before = self._live()
        wire = Wire(self._http.port)

        def call() -> Answer:
            try:
                return wire.get(path)
            finally:
                wire.close()

        future = self._threads.submit(call)
        eventually(self._live, lambda live: live > before or future.done())
        return future

    def _live(self) -> int:
        lines = self._http.get("/metrics").body.decode().splitlines()
        found = [
            line for line in lines if line.startswith("tailrace_live_connections") and "long-poll" in line
        ]
        return int(float(found[0].rsplit(" ", 1)[1]))
