"""Cached slices in memory and on disk, recent responses at the tail, and compressed forms.

All caches are LRU and bounded in bytes. A disk file is `<2 hex>/<SHA-256 of the key>`: eight bytes of magic,
the lengths of head and body, the CRC32C of both, the head (JSON) and the body. It is written under a
temporary name and renamed, and checked on every read; a file that is damaged, or of another server or epoch,
is deleted. The directory is private, because slices are data that not every user of the machine may read.
"""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import hashlib
import logging
import os
import re
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import google_crc32c
import msgspec
import orjson

from tailrace.common import private_files
from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.edge.context import EdgeContext
from tailrace.edge.metrics import EdgeTelemetry
from tailrace.edge.requests import response_lines, without_request_id
from tailrace.http.client import UpstreamResponse
from tailrace.protocol.http_headers import is_json, is_text, slice_etag_start

ENTRY_OVERHEAD_BYTES = 1024


class Slice:
    """A 200 response to a catch-up read."""

    __slots__ = (
        "body",
        "cache_control",
        "closed",
        "content_type",
        "earliest",
        "end",
        "epoch",
        "fields",
        "lines",
        "next",
        "queued_s",
        "start",
        "stored_at",
        "tag",
        "timing",
        "until",
        "up_to_date",
    )

    def __init__(
        self, fields: list[tuple[bytes, bytes]], body: bytes, stored_at: float, epoch: int = -1
    ) -> None:
        found = {name.lower(): value.decode("latin-1") for name, value in fields}
        self.fields = fields
        self.body = body
        self.stored_at = stored_at  # loop time
        self.until = inf  # loop time at which it must be revalidated
        self.epoch = epoch
        # Of its upstream request: time in the queue, and Server-Timing of the owner.
        self.queued_s = 0.0
        self.timing = b""
        self.content_type = found.get(b"content-type", "")
        self.cache_control = found.get(b"cache-control", "")
        self.tag = found.get(b"etag", "")
        self.start = slice_etag_start(self.tag)
        self.next = found.get(b"stream-next-offset", "")
        self.end = found.get(b"stream-end-offset", "")
        self.earliest = found.get(b"stream-earliest-offset", "")
        self.up_to_date = b"stream-up-to-date" in found
        self.closed = b"stream-closed" in found
        kept = [field for field in without_request_id(fields) if field[0].lower() not in _SEPARATE]
        self.lines = response_lines(kept)

    @classmethod
    def from_response(cls, reply: UpstreamResponse, body: bytes, now: float, sent_at: float) -> Slice:
        return cls(reply.fields, body, now).brought_by(reply, sent_at)

    def confirmed(self, reply: UpstreamResponse, now: float, sent_at: float) -> Slice:
        """The same body with the header of a 304, which has only changed fields."""
        head = {name.lower(): (name, value) for name, value in (*self.fields, *reply.fields)}
        return Slice([*head.values()], self.body, now).brought_by(reply, sent_at)

    def brought_by(self, reply: UpstreamResponse, sent_at: float) -> Slice:
        """Records timing for Server-Timing, and the cache lifetime."""
        self.queued_s = reply.queued_s
        self.timing = reply.get(b"server-timing") or b""
        if not self.is_immutable:
            stated = _MAX_AGE.search(self.cache_control)
            spent_s = reply.number(b"age") or 0  # of a response cached by another edge
            # From the time of the request, so that it expires here before it does at the owner.
            self.until = -inf if stated is None else sent_at + int(stated[1]) - spent_s
        return self

    @property
    def is_immutable(self) -> bool:
        return "immutable" in self.cache_control

    @property
    def is_open(self) -> bool:
        """Whether it ends at the tail of an open stream."""
        return self.cache_control == "no-cache"

    @property
    def is_empty(self) -> bool:
        return self.body == (b"[]" if is_json(self.content_type) else b"")

    @property
    def size(self) -> int:
        return len(self.body) + len(self.lines) + ENTRY_OVERHEAD_BYTES


_MAX_AGE = re.compile(r"max-age=([0-9]{1,12})")
_SEPARATE = frozenset(
    (
        b"content-type",
        b"stream-end-offset",
        b"stream-earliest-offset",
        b"age",
        b"vary",
    )
)


class MemoryCache:
    """LRU cache of slices, bounded in bytes. A stream's slices can be dropped together."""

    def __init__(self, bytes_max: int, telemetry: EdgeTelemetry) -> None:
        self._telemetry = telemetry
        self._slices: LruCache[tuple[str, ...], Slice] = LruCache(
            size_max=bytes_max, size_of=lambda _, found: found.size, on_evict=self._on_evict
        )
        self._by_name: dict[str, set[tuple[str, ...]]] = {}
        telemetry.edge_cache_bytes.reads[("memory",)] = lambda: self.bytes

    @property
    def bytes(self) -> int:
        return self._slices.size

    def __contains__(self, key: tuple[str, ...]) -> bool:
        return key in self._slices

    def get(self, key: tuple[str, ...]) -> Slice | None:
        return self._slices.get(key)

    def put(self, key: tuple[str, ...], found: Slice) -> None:
        self.discard(key)
        if self._slices.put(key, found):
            self._by_name.setdefault(key[0], set()).add(key)

    def discard(self, key: tuple[str, ...]) -> None:
        if self._slices.pop(key) is not None:
            self._unlist(key)

    def drop(self, name: str) -> None:
        for key in self._by_name.pop(name, ()):
            self._slices.pop(key)

    def _on_evict(self, key: tuple[str, ...], _: Slice) -> None:
        self._unlist(key)
        self._telemetry.edge_cache_evictions.add("memory")

    def _unlist(self, key: tuple[str, ...]) -> None:
        keys = self._by_name[key[0]]
        keys.discard(key)
        if not keys:
            del self._by_name[key[0]]


RECENT_BYTES_MAX = 32 * 1024 * 1024


class RecentRead(NamedTuple):
    """A response, and the state of its stream at the time of the request."""

    slice: Slice
    generation: int
    writes: int
    at: float


# Shorter bodies are not compressed.
BODY_BYTES_MIN = 1024
# Longer bodies are compressed in a thread.
INLINE_BYTES_MAX = 32 * 1024
COMPRESSED_BYTES_MAX = 32 * 1024 * 1024
LEVEL = 1
VARY_HEADER = b"Vary: Accept-Encoding\r\n"
GZIP_HEADER = b"Content-Encoding: gzip\r\n"


class SliceCompressor:
    """Compressed slices; those read often are compressed once."""

    def __init__(self) -> None:
        # The size includes the slice, which may be referenced only here.
        self._packed: LruCache[Slice, bytes] = LruCache(
            size_max=COMPRESSED_BYTES_MAX, size_of=lambda found, packed: found.size + len(packed)
        )

    async def compress(self, found: Slice) -> bytes:
        packed = self._packed.get(found)
        if packed is not None:
            return packed
        if len(found.body) <= INLINE_BYTES_MAX:
            packed = gzip.compress(found.body, LEVEL, mtime=0)
        else:
            packed = await asyncio.to_thread(gzip.compress, found.body, LEVEL, mtime=0)
        self._packed.put(found, packed)
        return packed


def is_compressible(found: Slice) -> bool:
    return len(found.body) >= BODY_BYTES_MIN and is_text(found.content_type)


def accepts_gzip(accepted: bytes) -> bool:
    """Whether `Accept-Encoding` allows it. Only a quality of 0 forbids it."""
    for item in accepted.lower().split(b","):
        coding, _, weight = item.partition(b";")
        if coding.strip() in (b"gzip", b"x-gzip"):
            return weight.replace(b" ", b"").removeprefix(b"q=").strip(b"0.") != b"" or not weight.strip()
    return False


logger = logging.getLogger("tailrace.edge")

crc32c = cast("Callable[[bytes], int]", google_crc32c.value)  # pyright: ignore[reportUnknownMemberType]
MAGIC = b"TREDGE2\n"
HEADER_LAYOUT = struct.Struct(">8sIII")  # magic, length of the head, length of the body, CRC32C
# The owner remembers deleted names for 30 days: within that time a new stream has a higher epoch.
AGE_S_MAX = 7 * 86_400
PENDING_MAX = 64
LOCK = "lock"
ROOT = 0

DiskKey = tuple[str, ...]


class SliceHeader(msgspec.Struct, frozen=True):
    """The head of a cache file."""

    key: list[str]
    deployment: str  # of its server: another server may have a stream of the same name
    epoch: int
    at_s: float
    fields: list[tuple[str, str]]


class DiskCache:
    """LRU cache on disk, bounded in bytes. I/O runs in threads; the index belongs to the loop."""

    def __init__(self, context: EdgeContext, directory: Path) -> None:
        self._context = context
        self._directory = directory
        self._files: LruCache[str, int] = LruCache(  # sizes by digest
            size_max=context.limits.edge_disk_cache_bytes,
            size_of=lambda _, size: size,
            on_evict=lambda digest, _: self._on_evict(digest),
        )
        self._pending = 0
        self._on = True
        self._threads = ThreadPoolExecutor(2, "tailrace-edge-disk")
        self._lock: BinaryIO = lock_directory(directory)
        for digest, size in _scan(directory):
            self._store(digest, size)
        context.telemetry.edge_cache_bytes.reads[("disk",)] = lambda: self.bytes

    @property
    def bytes(self) -> int:
        return self._files.size

    def may_have(self, key: DiskKey) -> bool:
        return self._on and digest_of(key) in self._files

    async def get(self, key: DiskKey, deployment: str, epoch: int) -> Slice | None:
        digest = digest_of(key)
        if not self._on or not deployment or self._files.get(digest) is None:
            return None
        path = self._path(digest)
        found = await self._context.loop.run_in_executor(
            self._threads, read_slice, path, key, deployment, epoch
        )
        if found is None:
            if self._files.pop(digest) is not None:
                self._delete(digest)
            return None
        head, body = found
        age_s = max(0.0, self._context.now_s() - head.at_s)
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.fields]
        return Slice(fields, body, self._context.loop.time() - age_s, head.epoch)

    def put(self, key: DiskKey, found: Slice, deployment: str) -> None:
        """Stores a slice, unless the disk is too slow or failed, or its deployment is unknown."""
        if not self._on or not deployment or self._pending >= PENDING_MAX:
            return
        self._pending += 1
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in found.fields]
        head = orjson.dumps(
            {
                "key": list(key),
                "deployment": deployment,
                "epoch": found.epoch,
                "at_s": self._context.now_s(),
                "fields": fields,
            }
        )
        self._context.tasks.start(self._write(digest_of(key), head, found.body))

    async def _write(self, digest: str, head: bytes, body: bytes) -> None:
        path = self._path(digest)
        try:
            size = await self._context.loop.run_in_executor(self._threads, write_slice, path, head, body)
        except OSError as error:
            if self._on:
                self._on = False
                logger.warning("disk cache disabled", extra=log_fields(error=str(error)))
            return
        finally:
            self._pending -= 1
        self._store(digest, size)

    def _store(self, digest: str, size: int) -> None:
        if not self._files.put(digest, size):
            self._on_evict(digest)

    def _on_evict(self, digest: str) -> None:
        self._context.telemetry.edge_cache_evictions.add("disk")
        self._delete(digest)

    def _delete(self, digest: str) -> None:
        self._threads.submit(self._path(digest).unlink, missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._lock.close()


def digest_of(key: DiskKey) -> str:
    return hashlib.sha256("\0".join(key).encode()).hexdigest()


def lock_directory(directory: Path) -> BinaryIO:
    """Locks the directory: one edge per directory."""
    try:
        _check_own(directory)
        private_files.make_private_directory(directory)
        held = private_files.open_lock_file(directory / LOCK)
    except OSError as error:
        raise TailraceError("unavailable", f"cannot use the cache directory {directory}: {error}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise TailraceError("unavailable", f"another edge uses the cache directory {directory}") from None
    return held


def _check_own(directory: Path) -> None:
    """Refuses a directory that cannot be made private, or has other files."""
    if not directory.exists() or not (status := directory.stat()).st_mode & private_files.OTHER_USERS_MODE:
        return
    reason = ""
    if os.geteuid() not in (ROOT, status.st_uid):
        reason = "belongs to another user"
    elif any(not _is_ours(path) for path in directory.iterdir()):
        reason = "has files of other programs"
    if reason:
        raise TailraceError(
            "unavailable",
            f"the cache directory {directory} is open to other users and {reason};"
            f" give the edge a directory of its own, such as {directory / 'edge'}",
        )


def _is_ours(path: Path) -> bool:
    return path.name in (LOCK, "lost+found") or (len(path.name) == 2 and path.is_dir())


def _scan(directory: Path) -> list[tuple[str, int]]:
    """The files of an earlier process, least recently used first; deletes unfinished files."""
    found: list[tuple[float, str, int]] = []
    for folder in directory.iterdir():
        if len(folder.name) != 2 or not folder.is_dir():
            continue
        private_files.restrict_to_owner(folder, private_files.DIRECTORY_MODE)
        for entry in os.scandir(folder):
            if len(entry.name) != 64:
                Path(entry.path).unlink(missing_ok=True)
                continue
            status = entry.stat()
            if status.st_mode & private_files.OTHER_USERS_MODE:
                Path(entry.path).chmod(private_files.FILE_MODE)
            found.append((status.st_mtime, entry.name, status.st_size))
    return [(name, size) for _, name, size in sorted(found)]


def write_slice(path: Path, head: bytes, body: bytes) -> int:
    path.parent.mkdir(mode=private_files.DIRECTORY_MODE, exist_ok=True)
    rest = head + body
    data = HEADER_LAYOUT.pack(MAGIC, len(head), len(body), crc32c(rest)) + rest
    unfinished = path.with_suffix(f".{time.monotonic_ns()}")
    try:
        with private_files.create_private_file(unfinished) as file:
            file.write(data)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return len(data)


def read_slice(path: Path, key: DiskKey, deployment: str, epoch: int) -> tuple[SliceHeader, bytes] | None:
    """The slice of a file; None if it is damaged or of another stream."""
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    if len(data) < HEADER_LAYOUT.size:
        return None
    magic, head_bytes, body_bytes, checksum = HEADER_LAYOUT.unpack_from(data)
    rest = data[HEADER_LAYOUT.size :]
    if magic != MAGIC or len(rest) != head_bytes + body_bytes or crc32c(rest) != checksum:
        return None
    try:
        head = msgspec.json.decode(rest[:head_bytes], type=SliceHeader)
    except msgspec.DecodeError:
        return None
    if tuple(head.key) != key or head.deployment != deployment or head.epoch != epoch:
        return None
    if time.time() - head.at_s > AGE_S_MAX:
        return None
    return head, rest[head_bytes:]
