"""The listing of routing keys finds every key once, in order, wherever its entries are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append, Lifetime
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log import routing_keys
from tailrace.log.routing_keys import KeyListing, SmallestKeys

JSON = "application/json"
FOREVER_S = 3600.0
NOTHING = Append([], JSON)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(journal_file_bytes=2048, seal_entries=5, block_cache_bytes=0))
    yield harness
    harness.close()


def add(harness: LogHarness, name: str, *keys: str | None) -> None:
    for key in keys:
        append = Append([b'"' + b"x" * 50 + b'"'], JSON, key=None if key is None else key.encode())
        assert harness.append(name, append).code is None
    harness.settle()


def fold(harness: LogHarness) -> None:
    """Everything in retired files goes to the hot store."""
    harness.call(harness.log.rotate_journal)
    harness.settle()
    while harness.retired:
        harness.checkpoint(tell=True)


def walk(harness: LogHarness, listing: KeyListing, name: str, limit: int) -> list[str]:
    """All pages, each one checked."""
    stream = harness.log.readable(name)
    found: list[bytes] = []
    after: bytes | None = None
    while True:
        page = harness.run(listing.page(stream, after, limit, FOREVER_S))
        assert len(page.keys) <= limit
        assert page.missing_segments == 0
        assert page.unsealed_rows == stream.visible - max(stream.sealed, stream.earliest)
        found += page.keys
        if not page.more:
            return [key.decode() for key in found]
        assert len(page.keys) == limit
        after = page.keys[-1]


def test_k1_every_key_once_in_order_in_every_state(harness: LogHarness) -> None:
    generator = random.Random(7)
    names = [*"aBcdeZ", "á", "é", "😀", "\uffff", "A", "a\u0000b", *(f"user{n:03}" for n in range(40))]
    harness.create("s", JSON, Lifetime(), NOTHING, None)
    listing = harness.call(KeyListing, harness.log)
    used: set[str] = set()
    for turn in range(12):
        keys = [generator.choice(names) if generator.random() < 0.8 else None for _ in range(12)]
        add(harness, "s", *keys)
        used |= {key for key in keys if key is not None}
        if turn % 3 == 1:
            fold(harness)
        if turn % 4 == 3:
            harness.seal(harness.log.existing("s"))
        expected = sorted(used, key=str.encode)
        for limit in (1, 7, 500):
            assert walk(harness, listing, "s", limit) == expected
    assert harness.log.existing("s").sealed > 0
    harness.reopen()
    listing = harness.call(KeyListing, harness.log)
    assert walk(harness, listing, "s", 9) == sorted(used, key=str.encode)


def test_k1_a_fork_lists_what_it_shows(harness: LogHarness) -> None:
    harness.create("source", JSON, Lifetime(), NOTHING, None)
    add(harness, "source", "a", "b", "c", "d", "e", "f")
    fold(harness)
    harness.seal(harness.log.existing("source"))
    fold(harness)
    harness.create("fork", JSON, Lifetime(), NOTHING, ("source", (0, 3), 0))
    harness.settle()
    add(harness, "source", "z")
    add(harness, "fork", "own")
    listing = harness.call(KeyListing, harness.log)
    stream = harness.log.readable("fork")
    page = harness.run(listing.page(stream, None, 100, FOREVER_S))
    assert (page.keys, page.more, page.segments, page.unsealed_rows) == (
        [b"a", b"b", b"c", b"own"],
        False,
        1,
        1,
    )


def test_segments_without_time_are_told(harness: LogHarness) -> None:
    harness.create("s", JSON, Lifetime(), NOTHING, None)
    add(harness, "s", *(f"k{number:02}" for number in range(12)))
    fold(harness)
    harness.seal(harness.log.existing("s"))
    fold(harness)
    add(harness, "s", "recent")
    listing = harness.call(KeyListing, harness.log)
    stream = harness.log.readable("s")
    page = harness.run(listing.page(stream, None, 100, -1.0))
    assert (page.segments, page.missing_segments) == (0, 3)
    assert b"recent" in page.keys
    whole = harness.run(listing.page(stream, None, 100, FOREVER_S))
    assert (whole.segments, whole.missing_segments, len(whole.keys)) == (3, 0, 13)
    again = harness.run(listing.page(stream, b"k05", 3, -1.0))
    assert (again.keys, again.missing_segments) == ([b"k06", b"k07", b"k08"], 0), "what was scanned is kept"


def test_memory_pressure_and_many_listings_are_refused(
    harness: LogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.create("s", JSON, Lifetime(), NOTHING, None)
    harness.settle()
    listing = harness.call(KeyListing, harness.log)
    stream = harness.log.readable("s")
    harness.log.pressure = TailraceError("overloaded", "short")
    with pytest.raises(TailraceError):
        harness.run(listing.page(stream, None, 1, FOREVER_S))
    harness.log.pressure = None
    monkeypatch.setattr(routing_keys, "SCANS_WAITING_MAX", 0)
    with pytest.raises(TailraceError):
        harness.run(listing.page(stream, None, 1, FOREVER_S))


def test_only_so_many_keys_are_held() -> None:
    smallest = SmallestKeys(b"m", 3)
    for number in range(50_000):
        smallest.add([b"z%06d" % number, None, b"a"])
    assert smallest.first() == [b"z000000", b"z000001", b"z000002"]
