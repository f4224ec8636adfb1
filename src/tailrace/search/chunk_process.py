"""Builds chunks of the tail index in a separate process.

A row with many fields takes 20 microseconds, time that a thread of the server would take from appends. The
process starts when there are many rows to index and ends after a while without work. It runs at a low CPU
priority: when appends need the whole machine the index falls behind, and catches up later. Streams that are
being searched have a second process at normal priority.

Protocol: a frame is its length and a body. A request holds the registry, the first entry and the payloads;
the response is a pickled chunk, or empty if the chunk could not be built.
"""

from __future__ import annotations

import logging
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from io import FileIO
from typing import Final, cast

from tailrace.common import process
from tailrace.schema.registry import read_registry
from tailrace.search.chunks import Chunk, build_columns
from tailrace.search.records import RecordDecoder, RecordView

logger = logging.getLogger("tailrace.query")


_LENGTH: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<QQQ")  # first entry, bytes of the registry, payloads
_VIEWS_CACHED_MAX: Final = 16

Payload = bytes | memoryview


class ChunkProcessError(Exception):
    """The process ended, cannot be started, or could not build the chunk."""


class ChunkProcess:
    """The server's side: one request at a time. `build` blocks; call it on `thread`."""

    def __init__(self, idle_s: float, niceness: int = process.HELPER_NICENESS) -> None:
        self._idle_s = idle_s
        self._niceness = niceness
        self.thread = ThreadPoolExecutor(1, "chunk-process")
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._used_s = 0.0
        self.closed = False

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.pid

    def build(self, document: bytes, first: int, payloads: Sequence[Payload]) -> Chunk:
        """Build the chunk of consecutive entries from `first` on. `document` is the stream's registry."""
        request = encode_request(document, first, payloads)
        with self._lock:
            self._used_s = time.monotonic()
            try:
                child = self._running()
                _write_frame(cast("FileIO", child.stdin), request)
                response = _read_frame(cast("FileIO", child.stdout))
            except OSError as error:
                self._end()
                raise ChunkProcessError(str(error)) from error
            if response is None:
                self._end()
                raise ChunkProcessError("indexing process ended")
            self._used_s = time.monotonic()
        if not response:
            raise ChunkProcessError("indexing process could not build the chunk")
        return pickle.loads(response)  # noqa: S301 - from our own process

    def end_if_idle(self) -> None:
        """Called periodically. An idle process holds about 40 MB."""
        if self._child is not None and time.monotonic() - self._used_s >= self._idle_s:
            if self._lock.acquire(blocking=False):
                self._end()
                self._lock.release()

    def close(self) -> None:
        """End the process. A request in progress fails."""
        self.closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        child = self._child
        if child is not None:
            child.kill()
            with self._lock:  # released at once: a waiting request sees the end of the process
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.closed:
            raise OSError("server is stopping")
        if self._child is None:
            self._child = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "tailrace.search.chunk_process", str(self._niceness)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def encode_request(document: bytes, first: int, payloads: Sequence[Payload]) -> bytes:
    lengths = array("I", map(len, payloads))
    head = _HEAD.pack(first, len(document), len(payloads))
    return b"".join((head, document, lengths.tobytes(), *payloads))


def build_pickled_chunk(request: bytes) -> bytes:
    """Handle one request in the process."""
    first, document_bytes, count = _HEAD.unpack_from(request)
    at = _HEAD.size + document_bytes
    document = request[_HEAD.size : at]
    lengths = array("I", request[at : at + 4 * count])
    at += 4 * count
    payloads: list[Payload] = []
    for length in lengths:
        payloads.append(request[at : at + length])
        at += length
    return pickle.dumps(build_chunk(*_cached_view(document), first, payloads), protocol=5)


def build_chunk(view: RecordView, decoder: RecordDecoder, first: int, payloads: Sequence[Payload]) -> Chunk:
    """Build the chunk of consecutive entries from `first` on."""
    entries = range(first, first + len(payloads))
    members = decoder.all_members(entries, payloads)
    return Chunk(entries, build_columns(view.config, decoder.gets, members))


@lru_cache(_VIEWS_CACHED_MAX)
def _cached_view(document: bytes) -> tuple[RecordView, RecordDecoder]:
    view = RecordView(read_registry(document))
    return view, RecordDecoder(view, list(view.config.fields))


def _write_frame(pipe: FileIO, body: bytes) -> None:
    for part in (_LENGTH.pack(len(body)), body):
        rest = memoryview(part)
        while rest:
            rest = rest[pipe.write(rest) :]


def _read_frame(pipe: FileIO) -> bytes | None:
    """The body of the next frame; None at the end of the pipe."""
    head = _read_exactly(pipe, _LENGTH.size)
    return None if head is None else _read_exactly(pipe, _LENGTH.unpack(head)[0])


def _read_exactly(pipe: FileIO, count: int) -> bytes | None:
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        got = pipe.readinto(rest)
        if not got:
            return None
        rest = rest[got:]
    return bytes(found)


def main() -> None:
    """Serve requests until the server closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    process.lower_cpu_priority(int(sys.argv[1]))
    requests, responses = FileIO(0, "rb", closefd=False), FileIO(1, "wb", closefd=False)
    while (request := _read_frame(requests)) is not None:
        try:
            response = build_pickled_chunk(request)
        except Exception:
            logger.exception("tail index chunk failed")
            response = b""
        try:
            _write_frame(responses, response)
        except OSError:
            return


if __name__ == "__main__":
    main()
