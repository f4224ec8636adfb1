"""Where a stream lives: one worker for each name, found without asking anybody.

The worker is the one with the highest hash of its number and the name, so that another number of workers
moves no more names than it has to. What the server keeps for itself, documents and the hub included, lives on
the first worker: it changes several streams in one commit, and one worker has one journal.
"""

from __future__ import annotations

import re
from typing import Final

import xxhash

from tailrace.protocol import stream_names

FIRST_WORKER: Final = 0
STREAM_PREFIX: Final = b"/v1/stream/"
# `__registry__/2`: what worker 2 has to tell before it is in `__registry__`.
_SYSTEM_STREAM: Final = re.compile(r"__[a-z_]+__/(\d{1,3})")


class Placement:
    """The workers of one server, and which of them owns what."""

    def __init__(self, count: int) -> None:
        assert count >= 1
        self.count = count

    def home(self, name: str) -> int:
        """The worker that a name belongs to. Forks are with their source: see `homes.py`."""
        if name.startswith(("__", "hub/")):
            own = _SYSTEM_STREAM.fullmatch(name)
            return int(own[1]) if own is not None and int(own[1]) < self.count else FIRST_WORKER
        encoded = name.encode("utf-8", "surrogatepass")
        return max(range(self.count), key=lambda index: xxhash.xxh3_64_intdigest(encoded, index))


def system_stream_suffix(index: int) -> str:
    """What the names of a worker's own system streams end with."""
    return "" if index == FIRST_WORKER else f"/{index}"


def stream_in_path(path: bytes, *, whole: bool = False) -> str | None:
    """The stream that a path below `/v1/stream/` is about; None if no stream can be meant.

    `whole`: all of it is the name, as in a request that makes a stream.
    """
    raw = path[len(STREAM_PREFIX) :]
    if whole:
        return stream_names.decode_name(raw)
    name, slash, key = raw.rpartition(b"/pk/")
    if slash and b"/" not in key:
        return stream_names.decode_name(name)
    decoded = stream_names.decode_name(raw)
    if decoded is None or not stream_names.is_sub_resource_name(decoded):
        return decoded
    for inner in ("/touch/", "/_otlp/"):
        owner, slash, _ = decoded.rpartition(inner)
        if slash and owner:
            return owner
    return decoded.rpartition("/")[0] or None
