"""How large journal files are: short while checkpoints are behind, since appends wait for a whole file."""

from __future__ import annotations

from pathlib import Path

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.limits import MIB, Limits
from tailrace.log import commit_path
from tailrace.log.decide import CreateRequest
from tailrace.log.transaction import ignore_reply

FILE_BYTES = 48 * MIB
TAIL_BYTES = 32 * MIB
ENTRY = b"x" * MIB


def test_files_are_short_while_checkpoints_are_behind(tmp_path: Path) -> None:
    log = LogHarness(tmp_path, Limits(journal_file_bytes=FILE_BYTES, tail_memory_max_bytes=TAIL_BYTES))
    try:
        log.call(log.log.create, CreateRequest("a", "text/plain"), ignore_reply, None)
        log.log.checkpoint_pending = True  # a file is with the checkpointer, and it takes its time
        for _ in range(2 * TAIL_BYTES // MIB):
            assert log.append("a", Append([ENTRY], "text/plain")).code is None
            log.settle()
        ends = [end for _, end in log.retired]
        assert max(ends) <= FILE_BYTES
        assert ends[-1] <= commit_path.BUSY_FILE_BYTES + 2 * MIB
        while log.retired:
            log.checkpoint(tell=True)
        log.call(log.log.rotate_journal)
        log.settle()
        log.checkpoint(tell=True)
        assert log.log.journal.file_bytes == FILE_BYTES
    finally:
        log.close()
