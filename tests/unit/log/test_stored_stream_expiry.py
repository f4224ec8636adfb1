"""A stream that only the hot store knows expires once, and stays gone while its rows are still there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tailrace.common.clock import FakeClock
from tailrace.common.limits import Limits
from tailrace.log.decide import CreateRequest
from tailrace.log.log import Log
from tailrace.log.model import Lifetime
from tailrace.log.transaction import ignore_reply
from tailrace.storage.checkpointer import checkpoint_file

if TYPE_CHECKING:
    from pathlib import Path


async def _checkpoint_all(log: Log) -> None:
    await log.committer.drain()
    log.retire_active_file()
    seq, end = log.journal.durable_seq, log.journal.durable_end
    checkpoint_file(log.directory, log.store, seq, end, 10**18)
    log.checkpointed(seq)


def test_a_stored_stream_expires_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = FakeClock()
        log = Log(tmp_path, Limits(), clock, asyncio.get_running_loop())
        log.open()
        log.create(CreateRequest("short", "text/plain", Lifetime(ttl_s=10)), ignore_reply, None)
        await _checkpoint_all(log)
        assert "short" not in log.streams.by_name, "evicted: only the hot store has it"
        clock.advance(60)
        log.expiry.sweep_stored()
        batch = log.committer.newest
        assert batch is not None
        records = batch.payloads.copy()
        assert len(records) == 1
        for _ in range(3):
            log.expiry.sweep_stored()
            await log.committer.drain()
            assert log.find("short") is None
        registry = log.find("__registry__")
        assert registry is not None
        assert registry.visible == 2, "one insert, one delete"
        await log.close()
        again = Log(tmp_path, Limits(), clock, asyncio.get_running_loop())
        assert again.find("short") is None
        await again.close()

    asyncio.run(scenario())
