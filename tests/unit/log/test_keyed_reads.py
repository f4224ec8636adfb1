"""Pages by key say which entries they hold, wherever those entries are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.limits import Limits
from tailrace.log.model import Stream

JSON = "application/json"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(journal_file_bytes=4096, block_cache_bytes=0))
    yield harness
    harness.close()


def _append(log: LogHarness, key: bytes | None, *payloads: bytes) -> None:
    pending = log.append("s", Append(list(payloads), JSON, key=key))
    log.settle()
    assert pending.code is None


def _numbered(
    log: LogHarness, stream: Stream, after: int, key: bytes | None, bytes_max: int
) -> dict[int, bytes]:
    page = log.read(stream, after, bytes_max, 100, key, apart=True)
    assert len(page.parts) == page.count == len(page.entries())
    return {entry: bytes(part) for entry, part in zip(page.entries(), page.parts, strict=True)}


def test_a_page_with_entries_apart_numbers_them(log: LogHarness) -> None:
    log.create("s", JSON, (None, None), Append([], JSON), None)
    log.settle()
    _append(log, b"a", b"1", b"2")
    _append(log, b"b", b"3")
    _append(log, None, b"4", b"5")
    _append(log, b"a", b"6", b"7")
    stream = log.find("s")
    assert stream is not None
    for _ in range(2):
        assert _numbered(log, stream, 0, b"a", 1000) == {1: b"1", 2: b"2", 6: b"6", 7: b"7"}
        assert _numbered(log, stream, 1, b"a", 1000) == {2: b"2", 6: b"6", 7: b"7"}
        assert _numbered(log, stream, 2, b"a", 1) == {6: b"6"}
        assert _numbered(log, stream, 0, b"b", 1000) == {3: b"3"}
        assert _numbered(log, stream, 0, b"c", 1000) == {}
        assert _numbered(log, stream, 3, None, 1000) == {4: b"4", 5: b"5", 6: b"6", 7: b"7"}
        # Once more, with everything in the hot store.
        log.log.retire_active_file()
        log.create("other", JSON, (None, None), Append([], JSON), None)
        log.settle()
        while log.retired:
            log.checkpoint(tell=True)


def test_k2_each_of_many_keys_gives_exactly_its_entries(tmp_path: Path) -> None:
    """Five hundred keys over a few hundred segments, a part of the entries not yet in any."""
    log = LogHarness(tmp_path, Limits(journal_file_bytes=65_536, block_cache_bytes=0, seal_entries=5))
    try:
        log.create("s", JSON, (None, None), Append([], JSON), None)
        expected: dict[bytes, list[int]] = {}
        generator = random.Random(11)
        stream = None
        for entry in range(1, 1201):
            key = f"k{generator.randrange(500)}".encode()
            assert log.append("s", Append([b"%d" % entry], JSON, key=key)).code is None
            expected.setdefault(key, []).append(entry)
            if entry == 1100:
                log.settle()
                log.log.retire_active_file()
                log.put_meta("turn", b"1")
                while log.retired:
                    log.checkpoint(tell=True)
                stream = log.find("s")
                assert stream is not None
                while stream.sealed < stream.stored:
                    log.seal(stream)
        log.settle()
        assert stream is not None
        assert stream.sealed == 1100
        for key, entries in expected.items():
            assert list(_numbered(log, stream, 0, key, 1 << 20)) == entries
        assert _numbered(log, stream, 0, b"K1", 1 << 20) == {}
    finally:
        log.close()
