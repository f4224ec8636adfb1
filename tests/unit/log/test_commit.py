"""Group commit: the order of acknowledgements, and what a new journal file may claim about the one before."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tailrace.log.commit import CommitBatch, Committer
from tailrace.log.journal import Journal, JournalFile, JournalScan, files_to_replay

FILE_BYTES = 4096


class Desk:
    """A journal and a committer, and somebody who writes down what happens."""

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self.journal = Journal(directory, file_bytes, 0, 0, descriptors=4)
        self.journal.open_first()
        loop = asyncio.get_running_loop()
        self.committer = Committer(loop, self._reserve, self._acknowledge, self._fail, syncs_in_flight=4)
        self._loop = loop
        self.journal.on_prepared = self._prepared
        # A slow disk: several syncs are kept in flight.
        self.committer.sync_concurrency.sync_s, self.committer.sync_concurrency.permitted = 1.0, 4
        self.submitted = 0
        self.acknowledged: list[object] = []
        self.failed: list[object] = []
        self.certain: bool | None = None
        self._file: JournalFile | None = None

    def submit_number(self, size: int) -> None:
        self.committer.submit(self.submitted.to_bytes(size, "little"), self.submitted)
        self.submitted += 1

    def _prepared(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self.committer.resume_writing)
        except RuntimeError:
            pass  # the test is over; the next file is prepared all the same

    def _reserve(self, size: int, settled: bool) -> JournalFile | None:
        file = self.journal.reserve(size, settled)
        if file is not None and self._file is not None and file is not self._file:
            assert (self.journal.durable_seq, self.journal.durable_end) == (self._file.seq, self._file.end), (
                "a file was begun whose header vouches for what is not durable yet"
            )
        self._file = file or self._file
        return file

    def _acknowledge(self, batch: CommitBatch) -> None:
        assert batch.file is not None
        self.journal.settled(batch.file, batch.position + len(batch.data))
        self.acknowledged.extend(batch.items)

    def _fail(self, batches: list[CommitBatch], error: OSError, certain: bool) -> None:
        self.failed.extend(item for batch in batches for item in batch.items)
        self.certain = certain


def test_a_file_is_begun_only_when_the_one_before_is_durable(tmp_path: Path) -> None:
    async def scenario() -> Desk:
        desk = Desk(tmp_path)
        while desk.journal.seq < 6:
            desk.submit_number(700)
            await asyncio.sleep(0)
        await desk.committer.drain()
        desk.committer.stop()
        return desk

    desk = asyncio.run(scenario())
    assert not desk.failed
    assert desk.acknowledged == list(range(desk.submitted))
    read_back: list[int] = []
    for path, header, end in files_to_replay(tmp_path):
        read_back.extend(int.from_bytes(payload, "little") for _, payload in JournalScan(path, header, end))
    assert read_back == desk.acknowledged


def test_a_failed_batch_takes_everything_in_flight_with_it(tmp_path: Path) -> None:
    """Nothing stays in the file behind its last acknowledged record, whatever was written well."""

    async def scenario() -> Desk:
        desk = Desk(tmp_path, 1024 * 1024)
        desk.submit_number(10)
        await desk.committer.drain()
        file = desk.journal.active
        assert file is not None
        read_only = os.open(file.path, os.O_RDONLY)
        os.dup2(read_only, file.fds[1])  # the second commit thread cannot write
        os.close(read_only)
        while desk.certain is None:
            desk.submit_number(10)
            await asyncio.sleep(0)
        await desk.committer.drain()
        desk.committer.stop()
        return desk

    desk = asyncio.run(scenario())
    assert desk.certain
    assert desk.failed
    assert [*desk.acknowledged, *desk.failed] == list(range(desk.submitted))
    ((path, header, end),) = files_to_replay(tmp_path)
    assert [
        int.from_bytes(payload, "little") for _, payload in JournalScan(path, header, end)
    ] == desk.acknowledged
    assert path.stat().st_size == desk.journal.durable_end
