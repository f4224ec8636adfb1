"""Things that a process keeps from task to task: connections to servers, open stores."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Closable)


class ProcessCache(Generic[K, V]):
    """A few things, the least recently used closed first."""

    def __init__(self, make: Callable[[K], V], most: int) -> None:
        self._make = make
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = Lock()

    def get(self, key: K) -> V:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = self._make(key)
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)[1].close()
            else:
                self._kept.move_to_end(key)
            return found

    def close(self) -> None:
        with self._lock:
            while self._kept:
                self._kept.popitem()[1].close()
