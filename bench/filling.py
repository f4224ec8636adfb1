# pyright: strict
"""Fills a stream for readings that come later, as a well-behaved writer: told to wait, it waits."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Sequence
from typing import Final

from bench.cold import message
from bench.processes import PeerError, Running

MESSAGE_BYTES: Final = 1024
BATCH: Final = 64
WRITERS: Final = 4
POOL: Final = 64  # bodies; longer than any compressor looks back
PATIENCE_S: Final = 120.0
WAIT_S_MAX: Final = 5.0


def bodies() -> list[bytes]:
    """Arrays of messages of words and numbers, about as compressible as logs are."""
    draw = random.Random(7)
    made: list[bytes] = []
    for batch in range(POOL):
        one = [message(draw, batch * BATCH + index, MESSAGE_BYTES) for index in range(BATCH)]
        made.append(b"[" + b",".join(one) + b"]")
    return made


class Filler:
    """Several writers of one stream."""

    def __init__(self, server: Running, path: str) -> None:
        self._port = server.port
        self._path = path
        self._left = 0
        self._lock = threading.Lock()
        self._failure = ""
        self.waits = 0  # times that the server asked for patience
        self.waited_s = 0.0

    def fill(self, messages: int) -> None:
        client = self._connect()
        client.request("PUT", self._path, headers={"Content-Type": "application/json"})
        answer = client.getresponse()
        answer.read()
        client.close()
        if answer.status not in (200, 201):
            raise PeerError(f"creating {self._path} was answered with {answer.status}")
        self._left = messages // BATCH
        made = bodies()
        threads = [threading.Thread(target=self._write, args=(made,)) for _ in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure:
            raise PeerError(f"filling {self._path} failed: {self._failure}")

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def _next(self) -> int | None:
        with self._lock:
            if self._failure or self._left == 0:
                return None
            self._left -= 1
            return self._left

    def _write(self, made: Sequence[bytes]) -> None:
        client = self._connect()
        try:
            while (number := self._next()) is not None:
                self._append(client, made[number % POOL])
        except (OSError, http.client.HTTPException, PeerError) as error:
            self._failure = str(error) or type(error).__name__
        finally:
            client.close()

    def _append(self, client: http.client.HTTPConnection, body: bytes) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            client.request("POST", self._path, body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            answer.read()
            if answer.status in (200, 204):
                return
            if answer.status not in (429, 503) or time.monotonic() > deadline:
                raise PeerError(f"an append was answered with {answer.status}")
            wait_s = min(float(answer.headers.get("Retry-After") or 1), WAIT_S_MAX)
            with self._lock:
                self.waits += 1
                self.waited_s += wait_s
            time.sleep(wait_s)
