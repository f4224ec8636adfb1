"""Placement of streams on workers, the links to the other workers, and responses that wait for one of them.

Where a stream lives: one worker for each name, found without asking anybody.

The worker is the one with the highest hash of its number and the name, so that another number of workers
moves no more names than it has to. What the server keeps for itself, documents and the hub included, lives on
the first worker: it changes several streams in one commit, and one worker has one journal.

What a worker knows of the others, itself included.

What another worker refused with, to be said again here.

Answers that have to wait for somebody.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Mapping
from typing import Final, NamedTuple

import msgspec
import xxhash

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.http.relay import PeerClient
from tailrace.protocol import stream_names
from tailrace.routing import responses

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


class Peers(NamedTuple):
    own: int  # number of this worker
    placement: Placement
    peers: Mapping[
        int, PeerClient
    ]  # this worker among them: what is asked of all is asked of it in the same way
    doors: Mapping[int, str]  # where each takes connections that another accepted, by path


class PeerError(msgspec.Struct):
    """The part of an error's body that matters here."""

    code: str
    message: str


def decode_peer_error(answer: bytes) -> TailraceError:
    error = msgspec.json.decode(answer, type=dict[str, PeerError])["error"]
    return TailraceError(error.code, error.message)


logger = logging.getLogger("tailrace.workers")


class DeferredResponses:
    """Work for a request that goes on after its handler returned. Refusals are answered as ever."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
        except Exception:
            logger.exception("a request failed")
            responses.respond_error(exchange, TailraceError("internal", "internal error"))
