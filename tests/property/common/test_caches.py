"""The cache of recently used entries against a simple model of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.caches import LruCache

KEYS = st.integers(0, 7)
SIZES = st.integers(0, 40)
Step = tuple[str, int, int]
STEPS = st.lists(st.tuples(st.sampled_from(["get", "peek", "put", "pop", "clear"]), KEYS, SIZES), max_size=60)


class Model:
    """The entries as a list, least recently used first; an entry is its key and its size."""

    def __init__(self, entries_max: int | None, size_max: int | None, keep_newest: bool) -> None:
        self.entries: list[tuple[int, int]] = []
        self.evicted: list[tuple[int, int]] = []
        self._entries_max = 10**9 if entries_max is None else entries_max
        self._size_max = 10**9 if size_max is None else size_max
        self._keep_newest = keep_newest

    @property
    def size(self) -> int:
        return sum(size for _, size in self.entries)

    def find(self, key: int) -> tuple[int, int] | None:
        return next((entry for entry in self.entries if entry[0] == key), None)

    def put(self, key: int, size: int) -> bool:
        self.entries = [entry for entry in self.entries if entry[0] != key]
        if size > self._size_max and not self._keep_newest:
            return False
        self.entries.append((key, size))
        while len(self.entries) > 1 and (len(self.entries) > self._entries_max or self.size > self._size_max):
            self.evicted.append(self.entries.pop(0))
        return True


@given(STEPS, st.none() | st.integers(1, 5), st.none() | st.integers(1, 60), st.booleans())
def test_a_cache_keeps_the_recently_used_entries_within_its_bounds(
    steps: list[Step], entries_max: int | None, size_max: int | None, keep_newest: bool
) -> None:
    model = Model(entries_max, size_max, keep_newest)
    evicted: list[tuple[int, int]] = []
    cache: LruCache[int, tuple[int, int]] = LruCache(
        entries_max=entries_max,
        size_max=size_max,
        size_of=lambda _, entry: entry[1],
        keep_newest=keep_newest,
        on_evict=lambda _, entry: evicted.append(entry),
    )
    for step, key, size in steps:
        known = model.find(key)
        if step == "put":
            assert cache.put(key, (key, size)) == model.put(key, size)
        elif step == "clear":
            cache.clear()
            model.entries.clear()
        elif step == "pop":
            assert cache.pop(key) == known
            model.entries = [entry for entry in model.entries if entry[0] != key]
        else:
            assert (cache.get if step == "get" else cache.peek)(key) == known
            if step == "get" and known is not None:
                model.entries.remove(known)
                model.entries.append(known)
        assert list(cache) == [key for key, _ in model.entries]
        assert list(cache.values()) == model.entries
        assert cache.size == model.size
        assert len(cache) == len(model.entries)
        assert evicted == model.evicted
        assert all((entry[0] in cache) for entry in model.entries)


def test_a_bound_of_the_size_needs_the_size_of_an_entry() -> None:
    with pytest.raises(AssertionError):
        LruCache[int, int](size_max=10)
