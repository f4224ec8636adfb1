"""Free pages of the hot store: how many are given back, in which steps, and what a rebuild needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.storage.checkpointer import SLACK_BYTES, STEP_PAGES, excess_pages, is_vacuum_due, vacuum_step
from tailrace.storage.hot_store.database import BlockRow, FileSpace, HotDatabase

PAGE = 8192
BODY = b"x" * (256 * 1024)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[HotDatabase]:
    found = HotDatabase(tmp_path / "hot.db", writer=True)
    yield found
    found.close()


def fill(db: HotDatabase, blocks: int, kept_of: int) -> list[int]:
    """Writes blocks and deletes all but one of `kept_of`; the numbers of those that stay."""
    with db.write():
        for number in range(blocks):
            db.put_block(number, BlockRow(1, 1, b"", b"", None, BODY), 0)
    kept = [number for number in range(blocks) if number % kept_of == 0]
    with db.write():
        db.execute("DELETE FROM blocks WHERE number % ? != 0", (kept_of,))
    db.connection.wal_checkpoint()
    return kept


def content(db: HotDatabase) -> list[int]:
    return [int(str(number)) for number, body in db.rows("SELECT number, body FROM blocks") if body == BODY]


def test_a_new_file_can_give_pages_back_one_by_one(db: HotDatabase) -> None:
    assert db.space().incremental


def test_steps_are_bounded_and_come_to_an_end(db: HotDatabase, tmp_path: Path) -> None:
    kept = fill(db, blocks=200, kept_of=5)
    before = db.space()
    steps: list[int] = []
    while given_back := vacuum_step(tmp_path, db, short=True):
        steps.append(given_back)
    assert len(steps) >= 2
    assert max(steps) <= STEP_PAGES + STEP_PAGES // 500, "pages and, of some hundred, one of the map"
    assert sum(steps) >= before.free_pages
    assert db.space().free_pages == 0
    assert (tmp_path / "hot.db").stat().st_size == db.space().pages * PAGE
    assert (tmp_path / "hot.db-wal").stat().st_size == 0
    assert content(db) == kept
    assert list(db.rows("PRAGMA integrity_check")) == [("ok",)]


def test_a_file_of_an_older_version_is_rebuilt_beside_its_readers(db: HotDatabase, tmp_path: Path) -> None:
    db.execute("PRAGMA auto_vacuum=NONE")
    db.execute("VACUUM")
    assert not db.space().incremental
    kept = fill(db, blocks=200, kept_of=5)
    reader = HotDatabase(tmp_path / "hot.db")
    with reader.connection:
        assert content(reader) == kept
        assert vacuum_step(tmp_path, db, short=True) > 0
        assert content(reader) == kept, "its snapshot is from before"
    assert content(reader) == kept
    assert db.space().incremental
    assert db.space().free_pages == 0
    db.connection.wal_checkpoint()
    assert (tmp_path / "hot.db").stat().st_size == db.space().pages * PAGE
    reader.close()


def test_without_need_some_pages_stay_for_the_next_checkpoints(db: HotDatabase, tmp_path: Path) -> None:
    fill(db, blocks=100, kept_of=5)
    assert db.space().free_bytes < SLACK_BYTES
    assert vacuum_step(tmp_path, db, short=False) == 0


def test_a_rebuild_waits_until_it_gives_back_more_than_it_writes() -> None:
    half = FileSpace(pages=100_000, free_pages=50_000, page_bytes=PAGE, incremental=False)
    assert is_vacuum_due(half, short=True)
    assert not is_vacuum_due(half._replace(free_pages=49_999), short=True)
    assert is_vacuum_due(half._replace(free_pages=49_999, incremental=True), short=True)


def test_half_of_a_large_store_may_stay_free() -> None:
    space = FileSpace(pages=300_000, free_pages=100_000, page_bytes=PAGE, incremental=True)
    assert excess_pages(space, short=False) == 0
    assert excess_pages(space, short=True) == 100_000
    assert excess_pages(space._replace(pages=310_000, free_pages=110_000), short=False) == 10_000
