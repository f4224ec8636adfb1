"""Gives the free pages of the hot store back to the disk.

SQLite reuses pages that were freed, but keeps the file as large as it ever was. The checkpointer process, the
only writer of the file, moves pages from its end into free ones and cuts the end off: a bounded number per
step and only while no journal file waits. A file that an older version made has no map of its pages; it is
rebuilt once, within the write-ahead log, so that a crash leaves the old content or the new one. Readers are
not disturbed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

import apsw

from tailrace.storage.hot_store.hot import FileSpace, HotDatabase

logger = logging.getLogger("tailrace.checkpoint")

STEP_PAGES: Final = 2048  # 16 MiB: some 60 ms
# Free pages that are kept, because the next checkpoints need them again.
SLACK_BYTES: Final = 64 * 1024 * 1024
SLACK_SHARE: Final = 0.5  # of what is used
# A rebuilt file is written twice, to a temporary file and to the write-ahead log, before the old one is cut.
REBUILD_COPIES: Final = 2
REBUILD_MARGIN_BYTES: Final = 1024 * 1024


def excess_pages(space: FileSpace, *, short: bool) -> int:
    """Free pages to be given back; all of them if the disk is `short` of room."""
    kept = 0 if short else max(SLACK_BYTES, int(space.used_bytes * SLACK_SHARE)) // space.page_bytes
    return max(0, space.free_pages - kept)


def is_vacuum_due(space: FileSpace, *, short: bool) -> bool:
    excess = excess_pages(space, short=short)
    if space.incremental:
        return excess > 0
    # A rebuild costs what is used, and should give more than that back.
    return excess > 0 and space.free_bytes >= space.used_bytes


def vacuum_step(data_dir: Path, db: HotDatabase, *, short: bool) -> int:
    """Gives some pages back; how many. 0 if there is nothing to do, or no room to do it."""
    space = db.space()
    if not is_vacuum_due(space, short=short):
        return 0
    if space.incremental:
        for _ in db.rows(f"PRAGMA incremental_vacuum({min(STEP_PAGES, excess_pages(space, short=short))})"):
            pass  # one row for each page, in some versions
    else:
        free = os.statvfs(data_dir)
        if free.f_bavail * free.f_frsize < REBUILD_COPIES * space.used_bytes + REBUILD_MARGIN_BYTES:
            return 0
        # The temporary file would else be made in /tmp, which may be memory. It has no name there: a crash
        # leaves nothing behind.
        os.environ["SQLITE_TMPDIR"] = str(data_dir)
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        db.execute("VACUUM")
    truncate_wal(db)
    return space.pages - db.space().pages


def truncate_wal(db: HotDatabase) -> None:
    """Moves everything from the write-ahead log to the file, which is cut by that, and empties the log."""
    db.connection.set_busy_timeout(100)
    try:
        db.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        pass  # a reader still needs it; the next checkpoint does it
    finally:
        db.connection.set_busy_timeout(10_000)
