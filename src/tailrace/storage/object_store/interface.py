"""The object store interface: named blobs, created once or replaced under a condition.

`ObjectStore` is all that other code knows of a bucket. `open_object_store` selects the implementation by URL:
local files for ``file://``; for buckets a library that is imported only when one is opened. The errors of
each call are documented there; ObjectStoreUnavailableError can come from every one.

For programs without an event loop, such as Spark workers, there is a blocking wrapper.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from tailrace.common.limits import Limits

KEY_BYTES_MAX: Final = 1024  # the limit of S3, GCS and Azure
KEY_PART_BYTES_MAX: Final = 255  # one name in a directory, on every usual file system
PRIVATE_DIRECTORY: Final = ".tailrace"  # first part of keys that file:// reserves
SCHEMES: Final = ("file", "s3", "gs", "az", "memory")


class ObjectStoreError(Exception):
    """An object store request failed."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message


class ObjectMissingError(ObjectStoreError):
    """The object does not exist, or ends before the requested bytes."""


class ObjectExistsError(ObjectStoreError):
    """The object exists already and was not changed."""


class ObjectConflictError(ObjectStoreError):
    """The object is not the version that was to be replaced; it was left as it is."""


class ObjectStoreUnavailableError(ObjectStoreError):
    """The store could not be used, after every retry. A write may or may not have happened."""


class ObjectStoreRefusedError(ObjectStoreUnavailableError):
    """The store refuses access: keys, permissions or the bucket's name are wrong. Retrying does not help."""


class ObjectInfo(NamedTuple):
    key: str
    size: int
    etag: str  # empty in a listing if the store would have to read the object to know it
    modified_ns: int


class ObjectStore(Protocol):
    """One bucket, or a part of one. Keys are relative: parts joined by ``/``, none at the ends.

    On ``file://`` a key cannot also be the beginning of another (``a`` and ``a/b``); buckets do not mind.
    """

    url: str
    requests: Counter[str]  # tries: create, replace, get, range, head, list, delete; also retry and error

    @property
    def bytes_out(self) -> int: ...

    @property
    def bytes_in(self) -> int: ...

    async def create(self, key: str, data: bytes | memoryview) -> str:
        """Creates an object; returns its etag. Raises ObjectExistsError if one exists, even with these bytes.

        If a response was lost and the repeat finds exactly these bytes, they count as written by this call.
        """
        ...

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        """Replaces the version `etag` by `data`; None means that there is no object yet.

        Returns the new etag, or raises ObjectConflictError. After a lost response the same applies as in
        `create`, so two writers must never write the same bytes and both assume that they were first.
        """
        ...

    async def get(self, key: str) -> tuple[bytes, str]:
        """The whole object and its etag, or ObjectMissingError."""
        ...

    async def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Exactly the bytes [start, stop); ObjectMissingError if the object is not there or shorter."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Size, etag and time of an object, or ObjectMissingError."""
        ...

    async def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        """Up to `limit` objects with keys after `after`. Fewer if there are no more.

        `prefix` is empty or ends with ``/``. Keys are in order of code points. Some S3 servers sort part by
        part instead, so that all of ``a/`` comes before ``a.b``: paging by the last key is correct there too,
        but keys of two levels must not be compared.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""
        ...

    async def close(self) -> None:
        """Releases threads and connections after running requests have finished."""
        ...


def open_object_store(url: str, *, limits: Limits | None = None) -> ObjectStore:
    """The store of a URL: ``file:///directory``, ``s3://bucket/prefix``, ``gs://``, ``az://``, ``memory://name``.

    No request is made. Raises ValueError for any other URL.
    """
    limits = limits or Limits()
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or parts.query or parts.fragment:
        raise ValueError(
            f"{url!r} is not an object store URL; use file:///directory, s3://bucket/prefix, gs:// or az://"
        )
    if parts.scheme == "file":
        from pathlib import Path

        from tailrace.storage.object_store.files import FileObjectStore

        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"{url!r} has no absolute directory; use file:///var/lib/tailrace/objects")
        return FileObjectStore(Path(unquote(parts.path)), url)
    from tailrace.storage.object_store.cloud import open_cloud_store

    if not parts.netloc:
        raise ValueError(f"{url!r} has no bucket; use {parts.scheme}://bucket/prefix")
    return open_cloud_store(url, parts.scheme, parts.netloc, unquote(parts.path).strip("/"), limits)


def check_key(key: str) -> None:
    """Raises ValueError for names that some store cannot distinguish or that leave its directory."""
    if not key or len(key.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"{key[:50]!r} is not a key: it must have 1 to {KEY_BYTES_MAX} bytes")
    parts = key.split("/")
    for part in parts:
        if part in ("", ".", "..") or len(part.encode()) > KEY_PART_BYTES_MAX or not _is_plain_part(part):
            raise ValueError(f"{key!r} is not a key: {part!r} is not a valid part")
    if parts[0] == PRIVATE_DIRECTORY:
        raise ValueError(f"{key!r} is not a key: {PRIVATE_DIRECTORY} is reserved")


def _is_plain_part(part: str) -> bool:
    """Some servers treat a backslash as a slash."""
    return part.isprintable() and "\\" not in part


def check_prefix(prefix: str) -> None:
    if prefix:
        if not prefix.endswith("/"):
            raise ValueError(f"{prefix!r} is not a prefix: it must end with /")
        check_key(prefix[:-1])


T = TypeVar("T")


class BlockingRunner:
    """An event loop that runs only during a call. It does not survive a process fork."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine.

        Without `Runner.run`, which installs and removes an interrupt handler for each call and formats its
        repr including the result: that took longer for a segment than reading it.
        """
        return self._runner.get_loop().run_until_complete(step)

    def close(self) -> None:
        self._runner.close()
