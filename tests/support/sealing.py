"""A server that seals nearly everything at once, so that most reads cross segments; and looks at it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrace.storage.hot_store.database import inspect_hot_store

# A few entries make a segment, the journal moves on many times a second, and nothing stays in the cache.
SEALING_ENV = {
    "TAILRACE_SEAL_ENTRIES": "3",
    "TAILRACE_SEAL_AGE_MS": "40",
    "TAILRACE_SEAL_INTERVAL_MS": "20",
    "TAILRACE_JOURNAL_FILE_BYTES": "131072",
    "TAILRACE_BLOCK_CACHE_BYTES": "1",
}
WAIT_S_MAX = 60.0


def hot(data_dir: Path) -> dict[str, Any]:
    """What the hot store holds, by table."""
    rows: Any = inspect_hot_store(data_dir).get("rows", {})
    return rows


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S_MAX) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.02)


def unsealed_blocks(data_dir: Path) -> int:
    """Of streams that clients made: what the server notes about sealing is in nobody's way."""
    database = sqlite3.connect(f"file:{data_dir / 'hot.db'}?mode=ro", uri=True, timeout=10)
    try:
        query = "SELECT count(*) FROM blocks JOIN streams USING(number) WHERE substr(name, 1, 2) != '__'"
        return int(database.execute(query).fetchone()[0])
    finally:
        database.close()


def wait_sealed(data_dir: Path) -> None:
    """Waits until everything that clients appended is in segments and nowhere else."""

    def done() -> bool:
        rows = hot(data_dir)
        sealed = bool(rows) and rows["segments"] > 0 and rows["graves"] == 0
        return sealed and not unsealed_blocks(data_dir) and not list((data_dir / "spool").iterdir())

    wait_until(done, "everything sealed")
