"""The pipe to a server that has started this pipeline: settings and tokens come in, its end is our end.

Nothing secret is on the command line. The first line is a JSON object with the settings below; each later one
may bring another token. When the server is gone the pipe closes, and this process ends at once: no step of
any job needs a clean exit.
"""

from __future__ import annotations

import os
import threading
from typing import BinaryIO

import msgspec


class SupervisorSettings(msgspec.Struct, frozen=True):
    """What the server tells its pipeline. What it leaves out has the default of the command."""

    endpoint: str
    token: str | None = None
    master: str | None = None
    store: str | None = None
    directory: str | None = None
    jobs: str | None = None
    heap_bytes: int | None = None
    task_memory_bytes: int | None = None
    batch_segments: int | None = None
    batch_bytes: int | None = None
    group_segments: int | None = None
    check_ms: int | None = None
    conf: str | None = None
    log_level: str = "info"
    log_format: str = "auto"


class _TokenRenewal(msgspec.Struct):
    token: str | None = None


class ParentPipe:
    """Holds the reading end. `orders` are there when it is made."""

    def __init__(self, descriptor: int) -> None:
        self._pipe: BinaryIO = os.fdopen(descriptor, "rb")
        os.set_inheritable(descriptor, False)  # else the JVM would hold the pipe open
        self.orders = msgspec.json.decode(self._pipe.readline(), type=SupervisorSettings)
        self._token = self.orders.token
        threading.Thread(target=self._follow, name="leash", daemon=True).start()

    def token(self) -> str | None:
        return self._token

    def _follow(self) -> None:
        for line in self._pipe:
            renewed = msgspec.json.decode(line, type=_TokenRenewal)
            if renewed.token is not None:
                self._token = renewed.token
        os._exit(0)
