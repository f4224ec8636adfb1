"""Objects of a store as blocking calls, for drivers and for tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tailrace.spark.process_cache import ProcessCache
from tailrace.storage.object_store.interface import (
    BlockingRunner,
    ObjectConflictError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    open_object_store,
)

OBJECT_STORES_MAX: Final = 4


class BlockingObjectStore:
    """One store. Made where it is needed; never pickled."""

    def __init__(self, url: str) -> None:
        self._steps = BlockingRunner()
        self._objects: ObjectStore = open_object_store(url)

    def get(self, key: str) -> bytes:
        return self._steps.run(self._objects.get(key))[0]

    def create(self, key: str, data: bytes) -> bool:
        """Whether it is new. What is there already stays."""
        try:
            self._steps.run(self._objects.create(key, data))
        except ObjectExistsError:
            return False
        return True

    def find(self, key: str) -> tuple[bytes, str] | None:
        """The object and its etag."""
        try:
            return self._steps.run(self._objects.get(key))
        except ObjectMissingError:
            return None

    def replace(self, key: str, data: bytes, etag: str | None) -> bool:
        """Whether this is the object now: somebody else may have been faster."""
        try:
            self._steps.run(self._objects.replace(key, data, etag))
        except ObjectConflictError:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        self._steps.run(self._objects.delete(keys))

    def close(self) -> None:
        self._steps.run(self._objects.close())
        self._steps.close()


_object_stores: ProcessCache[str, BlockingObjectStore] = ProcessCache(BlockingObjectStore, OBJECT_STORES_MAX)


def shared_object_store(url: str) -> BlockingObjectStore:
    return _object_stores.get(url)
