"""Placement of streams on workers, the links to the other workers, and responses that wait for one of them.

Each name has one owner, computed without communication: the worker with the highest hash of its number and
the name (rendezvous hashing), so that a change of the number of workers moves as few names as possible.
System streams, documents and the hub are on the first worker: they change several streams in one commit, and
so need one journal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
import xxhash

from tailrace.common.errors import TailraceError
from tailrace.http.relay import PeerClient
from tailrace.protocol import stream_names

FIRST_WORKER: Final = 0
STREAM_PREFIX: Final = b"/v1/stream/"
# `__registry__/2`: events of worker 2 before they are delivered to `__registry__`.
_SYSTEM_STREAM: Final = re.compile(r"__[a-z_]+__/(\d{1,3})")


class Placement:
    """The workers of one server, and which of them owns which name."""

    def __init__(self, count: int) -> None:
        assert count >= 1
        self.count = count

    def owner(self, name: str) -> int:
        """The worker that owns a name. A fork may be on another one: see `fork_locations`."""
        if name.startswith(("__", "hub/")):
            own = _SYSTEM_STREAM.fullmatch(name)
            return int(own[1]) if own is not None and int(own[1]) < self.count else FIRST_WORKER
        encoded = name.encode("utf-8", "surrogatepass")
        return max(range(self.count), key=lambda index: xxhash.xxh3_64_intdigest(encoded, index))


def system_stream_suffix(index: int) -> str:
    """The suffix of the names of a worker's own system streams."""
    return "" if index == FIRST_WORKER else f"/{index}"


def stream_in_path(path: bytes, *, whole: bool = False) -> str | None:
    """The stream name in a path below `/v1/stream/`; None if it is invalid.

    `whole`: the whole path is the name, as in a request that creates a stream.
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
    ]  # including this worker, so that requests to all workers are sent in the same way
    handover_sockets: Mapping[int, str]  # paths of the sockets for connections that another worker accepted


class PeerError(msgspec.Struct):
    """The error in a response of another worker."""

    code: str
    message: str


def decode_peer_error(body: bytes) -> TailraceError:
    error = msgspec.json.decode(body, type=dict[str, PeerError])["error"]
    return TailraceError(error.code, error.message)
