"""An object store in a directory: one file per object, synced before it becomes visible.

A new object is written under `.tailrace/`, synced, and then linked to its name, which the kernel refuses if
the name exists. A replacement is renamed over the old file under a lock that every process takes, after
checking the old content. So a name always refers to a complete object, even after a crash, and several
processes may use the same directory, on a file system with `link` and `flock`.
"""

from __future__ import annotations

import asyncio
import fcntl
import heapq
import os
import secrets
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import xxhash

from tailrace.common.private_files import sync_directory
from tailrace.storage.object_store.interface import (
    PRIVATE_DIRECTORY,
    ObjectConflictError,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStoreUnavailableError,
    check_key,
    check_prefix,
)

FILE_THREADS: Final = 4
LOCKS: Final = 64  # keys share this many lock files, so that these do not pile up
SYNCED_MAX: Final = 4096
CHUNK_BYTES: Final = 1024 * 1024
PLACING_TRIES: Final = 100
NAMES_AT_ONCE: Final = 1000
# Opening such a thing is how "there is no object of that name" shows itself in a file system.
ABSENT_ERRORS: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

T = TypeVar("T")


class FileObjectStore:
    """See `ObjectStore`. The work is done on a few threads, as every call may block on the disk."""

    def __init__(self, root: Path, url: str) -> None:
        self.url = url
        self.requests: Counter[str] = Counter()
        self.bytes_out = 0
        self.bytes_in = 0
        self._files = _BlockingFiles(root)
        self._threads: ThreadPoolExecutor | None = None

    async def create(self, key: str, data: bytes | memoryview) -> str:
        check_key(key)
        etag = await self._run("create", key, lambda: self._files.create(key, data))
        self.bytes_out += len(data)
        return etag

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        check_key(key)
        new = await self._run("replace", key, lambda: self._files.replace(key, data, etag))
        self.bytes_out += len(data)
        return new

    async def get(self, key: str) -> tuple[bytes, str]:
        check_key(key)
        data, etag = await self._run("get", key, lambda: self._files.read(key))
        self.bytes_in += len(data)
        return data, etag

    async def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_key(key)
        assert 0 <= start <= stop
        data = await self._run("range", key, lambda: self._files.read_range(key, start, stop))
        self.bytes_in += len(data)
        return data

    def get_range_now(self, key: str, start: int, stop: int) -> bytes:
        """`get_range` for callers on a thread, which may block there; it counts nothing."""
        check_key(key)
        try:
            return self._files.read_range(key, start, stop)
        except OSError as error:
            raise self._unavailable(key, error) from error

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return await self._run("head", key, lambda: self._files.head(key))

    async def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        check_prefix(prefix)
        return await self._run("list", prefix, lambda: self._files.list_after(prefix, after, limit))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        await self._run("delete", keys[0] if keys else "", lambda: self._files.delete(keys))

    async def close(self) -> None:
        if self._threads is not None:
            await asyncio.to_thread(self._threads.shutdown)
            self._threads = None

    async def _run(self, kind: str, key: str, work: Callable[[], T]) -> T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="objects")
        self.requests[kind] += 1
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, work)
        except OSError as error:
            self.requests["error"] += 1
            raise self._unavailable(key, error) from error

    def _unavailable(self, key: str, error: OSError) -> ObjectStoreUnavailableError:
        return ObjectStoreUnavailableError(key, f"{self.url} is unavailable: {error.strerror}")


class _BlockingFiles:
    """The same, blocking. Every method may run on several threads and in several processes at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._own = root / PRIVATE_DIRECTORY
        # Directories whose own names are on the disk for sure, so that most objects cost one sync of theirs.
        self._synced: OrderedDict[Path, None] = OrderedDict()
        self._swept = False

    # -- writing ---------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes | memoryview) -> str:
        path = self._root / key
        if path.is_file():
            self._refuse_existing(key, path)
        with self._temporary(data) as temporary:
            self._place(key, path, lambda: os.link(temporary, path))
        return _etag(data)

    def replace(self, key: str, data: bytes, etag: str | None) -> str:
        path = self._root / key
        with self._temporary(data) as temporary, self._locked(key):
            if etag is None:
                try:
                    self._place(key, path, lambda: os.link(temporary, path))
                except ObjectExistsError as error:
                    raise ObjectConflictError(key, "exists") from error
                return _etag(data)
            try:
                now = self.read(key)[1]
            except ObjectMissingError as error:
                raise ObjectConflictError(key, "does not exist any more") from error
            if now != etag:
                raise ObjectConflictError(key, "was replaced meanwhile")
            self._place(key, path, lambda: temporary.rename(path))
        return _etag(data)

    def delete(self, keys: Sequence[str]) -> None:
        parents: set[Path] = set()
        for key in keys:
            path = self._root / key
            with self._locked(key):  # or a replacement could bring back what was deleted under its eyes
                try:
                    path.unlink()
                except ABSENT_ERRORS:
                    continue
            parents.add(path.parent)
        for parent in parents:
            self._sync_and_prune(parent)

    def _place(self, key: str, path: Path, put: Callable[[], object]) -> None:
        """Links a synced file to its name. Retried if another process deletes a directory meanwhile."""
        for _ in range(PLACING_TRIES):
            try:
                self._make_directories(path.parent)
                put()
                sync_directory(path.parent)
            except FileNotFoundError:
                self._synced.pop(path.parent, None)
            except FileExistsError:
                if path.is_file():
                    self._refuse_existing(key, path)
                if path.is_dir() or not path.parent.is_dir():
                    raise
            else:
                return
        raise ObjectStoreUnavailableError(key, "its directory is deleted repeatedly")

    def _refuse_existing(self, key: str, path: Path) -> NoReturn:
        """Syncs an existing object before it is reported, so that it survives a power cut."""
        try:
            sync_directory(path.parent)
        except FileNotFoundError:
            pass
        raise ObjectExistsError(key, "exists")

    def _make_directories(self, directory: Path) -> None:
        if directory in self._synced and directory.is_dir():
            return
        directory.mkdir(parents=True, exist_ok=True)
        # All of them: another process may have created one and not synced it yet.
        for path in (directory, *directory.parents):
            sync_directory(path.parent)
            self._synced[path] = None
            if path == self._root:
                break
        while len(self._synced) > SYNCED_MAX:
            self._synced.popitem(last=False)

    def _sync_and_prune(self, directory: Path) -> None:
        """Removes empty directories of deleted objects."""
        while directory != self._root:
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                break
            self._synced.pop(directory, None)
            directory = directory.parent
        try:
            sync_directory(directory)
        except FileNotFoundError:
            pass

    @contextmanager
    def _locked(self, key: str) -> Generator[None]:
        name = f"lock-{xxhash.xxh3_64_intdigest(key.encode()) % LOCKS:02d}"
        self._make_directories(self._own)
        fd = os.open(self._own / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _temporary(self, data: bytes | memoryview) -> Generator[Path]:
        """A synced temporary file with this content, removed afterwards."""
        self._make_directories(self._own)
        self._sweep()
        path, fd = self._open_temporary()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def _open_temporary(self) -> tuple[Path, int]:
        while True:
            path = self._own / f"new-{secrets.token_hex(8)}"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # The lock shows that its writer is alive. A sweep may have run between the two steps.
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return path, fd
            os.close(fd)

    def _sweep(self) -> None:
        """Once per process: remove what writers left that were killed."""
        if self._swept:
            return
        self._swept = True
        for path in self._own.glob("new-*"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                pass
            finally:
                os.close(fd)

    # -- reading ---------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, key: str) -> Generator[int]:
        try:
            fd = os.open(self._root / key, os.O_RDONLY | os.O_CLOEXEC)
        except ABSENT_ERRORS as error:
            if isinstance(error, NotADirectoryError) and not self._root.is_dir():
                raise  # it is the whole store that is not there
            raise ObjectMissingError(key, "does not exist") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ObjectMissingError(key, "does not exist")
            yield fd
        finally:
            os.close(fd)

    def read(self, key: str) -> tuple[bytes, str]:
        with self._opened(key) as fd:
            data = _read(fd, 0, os.fstat(fd).st_size)
        return data, _etag(data)

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        with self._opened(key) as fd:
            data = _read(fd, start, stop)
        if len(data) != stop - start:
            raise ObjectMissingError(key, f"ends before byte {stop}")
        return data

    def head(self, key: str) -> ObjectInfo:
        digest = xxhash.xxh3_128()
        with self._opened(key) as fd:
            facts = os.fstat(fd)
            while chunk := os.read(fd, CHUNK_BYTES):
                digest.update(chunk)
        return ObjectInfo(key, facts.st_size, digest.hexdigest(), facts.st_mtime_ns)

    def list_after(self, prefix: str, after: str, limit: int) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        if limit > 0:
            for info in self._walk(prefix, after):
                found.append(info)
                if len(found) == limit:
                    break
        return found

    def _walk(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Objects below a directory, in key order. Holds at most NAMES_AT_ONCE names per level."""
        begun = ""
        while True:
            names = self._smallest(prefix, after, begun)
            for name in names:
                if name.endswith("/"):
                    yield from self._walk(name, after)
                    continue
                try:
                    facts = (self._root / name).stat()
                except FileNotFoundError:
                    continue
                yield ObjectInfo(name, facts.st_size, "", facts.st_mtime_ns)
            if len(names) < NAMES_AT_ONCE:
                return
            begun = names[-1]

    def _smallest(self, prefix: str, after: str, begun: str) -> list[str]:
        """The next keys of one directory after `begun`; directories are ``name/``, to sort correctly."""
        try:
            with os.scandir(self._root / prefix) as entries:
                return heapq.nsmallest(NAMES_AT_ONCE, _names(entries, prefix, after, begun))
        except (FileNotFoundError, NotADirectoryError):
            return []


def _names(entries: Iterator[os.DirEntry[str]], prefix: str, after: str, begun: str) -> Iterator[str]:
    for entry in entries:
        # Names that are not UTF-8 are not ours, and the first level contains our private directory.
        if not entry.name.isprintable() or (not prefix and entry.name == PRIVATE_DIRECTORY):
            continue
        is_directory = entry.is_dir()
        name = prefix + entry.name + "/" * is_directory
        # A directory may sort before `after` and still have keys after it.
        if name > begun and (name > after or (is_directory and after.startswith(name))):
            yield name


def _read(fd: int, start: int, stop: int) -> bytes:
    parts: list[bytes] = []
    while start < stop and (part := os.pread(fd, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _etag(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)
