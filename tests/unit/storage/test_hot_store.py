"""The hot store: one writer, readers that are never in its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.common.errors import TailraceError
from tailrace.storage.hot_store.database import HOT_STORE_VERSION, HotDatabase


def test_a_reader_can_come_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    writer = HotDatabase(tmp_path / "hot.db", writer=True)
    writer.connection.execute("BEGIN IMMEDIATE")
    writer.set_fact("journal_seq", 7)
    reader = HotDatabase(tmp_path / "hot.db")
    assert reader.fact("journal_seq", 0) == 0
    writer.connection.execute("COMMIT")
    assert reader.fact("journal_seq", 0) == 7
    reader.close()
    writer.close()


def test_nobody_else_may_look_into_the_store(tmp_path: Path) -> None:
    """Whatever the umask is: the directory may be one that was there before."""
    writer = HotDatabase(tmp_path / "hot.db", writer=True)
    writer.set_fact("journal_seq", 7)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {"hot.db": 0o600, "hot.db-wal": 0o600, "hot.db-shm": 0o600}
    writer.close()


def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    HotDatabase(tmp_path / "hot.db").close()
    writer = HotDatabase(tmp_path / "hot.db", writer=True)
    writer.set_fact("version", HOT_STORE_VERSION + 1)
    writer.close()
    with pytest.raises(TailraceError, match="newer version"):
        HotDatabase(tmp_path / "hot.db")
