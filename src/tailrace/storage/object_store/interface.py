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

KEY_BYTES_MAX: Final = 1024  # what S3, GCS and Azure all take
KEY_PART_BYTES_MAX: Final = 255  # one name in a directory, on every usual file system
PRIVATE_DIRECTORY: Final = ".tailrace"  # first part of keys that file:// keeps for itself
SCHEMES: Final = ("file", "s3", "gs", "az", "memory")


class ObjectStoreError(Exception):
    """What an object store can answer instead of doing what it was asked."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message


class ObjectMissingError(ObjectStoreError):
    """There is no such object, or it ends before the bytes that were asked for."""


class ObjectExistsError(ObjectStoreError):
    """Somebody created the object before; it was left as it is."""


class ObjectConflictError(ObjectStoreError):
    """The object is not the version that was to be replaced; it was left as it is."""


class ObjectStoreUnavailableError(ObjectStoreError):
    """The store could not be used, after every retry. A write may or may not have happened."""


class ObjectStoreRefusedError(ObjectStoreUnavailableError):
    """The store refuses us: keys, rights or the bucket's name are wrong. Trying again does not help."""


class ObjectInfo(NamedTuple):
    key: str
    size: int
    etag: str  # empty in a listing where the store would have to read the object to know it
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
        """A new object; answers its etag. ObjectExistsError if there is one, be it the same.

        When an answer is lost and the repeat finds exactly these bytes, they count as ours.
        """
        ...

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        """Put `data` in place of the version `etag`; None means that there is no object yet.

        Answers the new etag, or raises ObjectConflictError. After a lost answer the same holds as in
        `create`, so two writers must never write the same bytes and both believe they were first.
        """
        ...

    async def get(self, key: str) -> tuple[bytes, str]:
        """The whole object and its etag, or ObjectMissingError."""
        ...

    async def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Exactly the bytes [start, stop); ObjectMissingError if the object is not there or shorter."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """What is known of an object without its content, or ObjectMissingError."""
        ...

    async def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        """Up to `limit` objects whose keys come after `after`. Fewer mean that there are no more.

        `prefix` is empty or ends with ``/``. Keys are in order of code points. Some servers that speak S3
        sort part by part instead, so that all of ``a/`` comes before ``a.b``: the next page is right there
        too when `after` is the last key of the one before, but nobody should compare keys of two levels.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""
        ...

    async def close(self) -> None:
        """Let go of threads and connections. What is under way ends first."""
        ...


def open_object_store(url: str, *, limits: Limits | None = None) -> ObjectStore:
    """The store behind a URL: ``file:///directory``, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``memory://name``.

    Nothing is asked of a bucket yet. ValueError if the URL is none of these.
    """
    limits = limits or Limits()
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or parts.query or parts.fragment:
        raise ValueError(
            f"{url!r} is no object store; use file:///directory, s3://bucket/prefix, gs:// or az://"
        )
    if parts.scheme == "file":
        from pathlib import Path

        from tailrace.storage.object_store.files import FileObjectStore

        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"{url!r} needs an absolute directory, as in file:///var/lib/tailrace/objects")
        return FileObjectStore(Path(unquote(parts.path)), url)
    from tailrace.storage.object_store.cloud import open_cloud_store

    if not parts.netloc:
        raise ValueError(f"{url!r} names no bucket, as in {parts.scheme}://bucket/prefix")
    return open_cloud_store(url, parts.scheme, parts.netloc, unquote(parts.path).strip("/"), limits)


def check_key(key: str) -> None:
    """Refuse names that some store could not keep apart, or that would leave the store's directory."""
    if not key or len(key.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"{key[:50]!r} is no key: 1 to {KEY_BYTES_MAX} bytes are")
    parts = key.split("/")
    for part in parts:
        if part in ("", ".", "..") or len(part.encode()) > KEY_PART_BYTES_MAX or not _is_plain_part(part):
            raise ValueError(f"{key!r} is no key: {part!r} cannot be a part of one")
    if parts[0] == PRIVATE_DIRECTORY:
        raise ValueError(f"{key!r} is no key: {PRIVATE_DIRECTORY} is the store's own")


def _is_plain_part(part: str) -> bool:
    """Some servers take a backslash for a slash."""
    return part.isprintable() and "\\" not in part


def check_prefix(prefix: str) -> None:
    if prefix:
        if not prefix.endswith("/"):
            raise ValueError(f"{prefix!r} is no prefix: it has to end with /")
        check_key(prefix[:-1])


T = TypeVar("T")


class BlockingRunner:
    """A loop that runs while somebody waits. It does not survive a fork, so it is made where it is needed."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        """What a step comes to.

        Not by `Runner.run`: around each step it puts a handler for interrupts in place and takes it away, for
        which the library writes the handler as a text, and with it what the step came to. That took longer
        for a segment than reading it does.
        """
        return self._runner.get_loop().run_until_complete(step)

    def close(self) -> None:
        self._runner.close()
