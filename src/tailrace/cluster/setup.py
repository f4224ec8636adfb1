"""What a worker is told when it starts: a line of JSON on its standard input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tailrace.common.settings import Settings
from tailrace.storage.bootstrap import BootstrapReport


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings  # with the worker's own data directory and the object store that all share
    index: int
    count: int
    sockets: str  # the directory of the workers' sockets
    restored: BootstrapReport | None = None  # what a bootstrap brought back before workers started

    def socket(self, index: int) -> str:
        return f"{self.sockets}/{index}"

    def door(self, index: int) -> str:
        """Where a worker takes connections that another accepted."""
        return f"{self.sockets}/{index}.door"

    @property
    def rates(self) -> str:
        """Where workers count together what identities ask."""
        return f"{self.sockets}/rates"

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def decode(cls, raw: bytes) -> WorkerSetup:
        return msgspec.json.decode(raw, type=cls, dec_hook=_path)


def _path(kind: type, value: Any) -> object:
    assert kind is Path
    return Path(value)
