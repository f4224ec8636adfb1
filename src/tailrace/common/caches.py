"""A cache of the most recently used entries, bounded in entries and in the sum of their sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView, Iterator, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Evicts the least recently used entries. Values are never None. Threads that share one need a lock.

    The size of an entry must not change while it is stored; to change it, put the entry again. One larger
    than `size_max` is not stored, or stored alone if `keep_newest` is set. `on_evict` is called with evicted
    entries, not with those that are replaced, popped or cleared.
    """

    __slots__ = ("_entries", "_entries_max", "_keep_newest", "_on_evict", "_size_max", "_size_of", "size")

    def __init__(
        self,
        *,
        entries_max: int | None = None,
        size_max: int | None = None,
        size_of: Callable[[K, V], int] | None = None,
        keep_newest: bool = False,
        on_evict: Callable[[K, V], None] | None = None,
    ) -> None:
        assert size_max is None or size_of is not None, "a bound of the size needs the size of an entry"
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._entries_max = entries_max
        self._size_max = size_max
        self._size_of = size_of
        self._keep_newest = keep_newest
        self._on_evict = on_evict
        self.size = 0  # of all entries, if `size_of` is given

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """The keys, least recently used first."""
        return iter(self._entries)

    def items(self) -> ItemsView[K, V]:
        return self._entries.items()

    def values(self) -> ValuesView[V]:
        return self._entries.values()

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def peek(self, key: K) -> V | None:
        """The value, without a change of the order; needs no lock."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> bool:
        """Store a value as the most recently used. False if it is too large to be stored."""
        self.pop(key)
        if self._size_of is not None:
            size = self._size_of(key, value)
            if self._size_max is not None and size > self._size_max and not self._keep_newest:
                return False
            self.size += size
        self._entries[key] = value
        if self._entries_max is not None and len(self._entries) > self._entries_max:
            self._evict()
        if self._size_max is not None:
            while self.size > self._size_max and len(self._entries) > 1:
                self._evict()
        return True

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value."""
        value = self._entries.pop(key, None)
        if value is not None and self._size_of is not None:
            self.size -= self._size_of(key, value)
        return value

    def clear(self) -> None:
        self._entries.clear()
        self.size = 0

    def _evict(self) -> None:
        key, value = self._entries.popitem(last=False)
        if self._size_of is not None:
            self.size -= self._size_of(key, value)
        if self._on_evict is not None:
            self._on_evict(key, value)
