"""What the tests of manifests share: streams and segments made up quickly, and a store that crashes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from tailrace.storage.manifests.model import StreamFacts
from tailrace.storage.object_store.interface import ObjectInfo, ObjectStore
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, segment_name

NAME = "orders/2026"
CREATED_NS = 1_767_225_600_000_000_000


def facts(
    tail: int, *, name: str = NAME, incarnation: int = 0, as_of: int = 0, **others: object
) -> StreamFacts:
    given: dict[str, object] = {
        "name": name,
        "stream_id": make_stream_id(name, incarnation),
        "incarnation": incarnation,
        "epochs": ((0, 1),),
        "created_ns": CREATED_NS,
        "content_type": "application/json",
        "tail": tail,
        "as_of": as_of,
        **others,
    }
    return StreamFacts(**given)  # pyright: ignore[reportArgumentType]


def segment(first: int, last: int, *, epoch: int = 0, content: str = "") -> SegmentInfo:
    """A segment as it is recorded; the same arguments give the same one."""
    sha256 = hashlib.sha256(f"{epoch}/{first}/{last}/{content}".encode()).hexdigest()
    rows = last - first + 1
    return SegmentInfo(
        key=segment_name(epoch, first, last, sha256),
        epoch=epoch,
        first=first,
        last=last,
        rows=rows,
        bytes=100 + 10 * rows,
        payload_bytes=12 * rows,
        sha256=sha256,
        first_ns=CREATED_NS + first,
        last_ns=CREATED_NS + last,
    )


def run_of(first: int, last: int, length: int = 1) -> list[SegmentInfo]:
    return [segment(start, min(start + length - 1, last)) for start in range(first, last + 1, length)]


class CrashError(BaseException):
    """The process is gone. No handler of an error may see this."""


class CrashingObjects:
    """A store whose user dies at the n-th call: before it reaches the store, or before it answers."""

    def __init__(self, inner: ObjectStore, calls: int, *, after: bool = False) -> None:
        self._inner = inner
        self._left = calls
        self._after = after
        self.url = inner.url
        self.requests: Counter[str] = inner.requests
        self.bytes_in = self.bytes_out = 0

    def _step(self, *, after: bool) -> None:
        if after == self._after:
            self._left -= 1
            if self._left < 0:
                raise CrashError

    async def create(self, key: str, data: bytes | memoryview) -> str:
        self._step(after=False)
        etag = await self._inner.create(key, data)
        self._step(after=True)
        return etag

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        self._step(after=False)
        new = await self._inner.replace(key, data, etag)
        self._step(after=True)
        return new

    async def get(self, key: str) -> tuple[bytes, str]:
        self._step(after=False)
        return await self._inner.get(key)

    async def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._step(after=False)
        return await self._inner.get_range(key, start, stop)

    async def head(self, key: str) -> ObjectInfo:
        self._step(after=False)
        return await self._inner.head(key)

    async def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        self._step(after=False)
        return await self._inner.list_after(prefix, after, limit)

    async def delete(self, keys: Sequence[str]) -> None:
        self._step(after=False)
        # Half of a batch may be gone when the process dies.
        await self._inner.delete(keys[: len(keys) // 2])
        self._step(after=True)
        await self._inner.delete(keys[len(keys) // 2 :])

    async def close(self) -> None:
        pass
