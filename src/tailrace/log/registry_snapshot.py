"""`__registry__` after a loss: what it told last may be missing, so it tells everything again.

A reset says that what readers have made of it so far counts no more; then follow all streams there are. That
this is due is a fact of the log, so a server that is killed meanwhile begins again. Of several logs each
tells of its own streams, and only the one that has `__registry__` itself says when that begins.
"""

from __future__ import annotations

import asyncio
from typing import Final

import orjson

from tailrace.common.errors import TailraceError
from tailrace.log import registry
from tailrace.log.decide import AppendRequest
from tailrace.log.listing import list_streams
from tailrace.log.log import Log
from tailrace.log.transaction import ignore_reply

REGISTRY_SNAPSHOT_DUE: Final = "registry/snapshot-due"
SNAPSHOT_PAGE_COUNT: Final = 500
SNAPSHOT_RETRY_S: Final = 0.2


async def republish_registry(log: Log) -> None:
    """Returns when it is durable. Does nothing unless it is due."""
    if REGISTRY_SNAPSHOT_DUE not in log.streams.meta or log.refusal is not None:
        return
    is_whole = not log.own_suffix
    if is_whole:
        await _append_messages(log, [_control_message("reset"), _control_message("snapshot-start")])
    after = ""
    while page := list_streams(log, after, "", SNAPSHOT_PAGE_COUNT, system=False):
        now_ns = log.clock.now_ns()
        # Nothing comes between the look and the append: a stream deleted later is told so later.
        await _append_messages(log, [registry.registry_snapshot_entry(stream, now_ns) for stream in page])
        after = page[-1].name
    if is_whole:
        await _append_messages(log, [_control_message("snapshot-end")])
    log.put_meta(REGISTRY_SNAPSHOT_DUE, None)
    await log.committer.drain()


def _control_message(kind: str) -> bytes:
    return orjson.dumps({"headers": {"control": kind}})


async def _append_messages(log: Log, messages: list[bytes]) -> None:
    request = AppendRequest(b",".join(messages), "application/json", lengths=[len(one) for one in messages])
    while True:
        try:
            log.append(log.existing(log.own.registry_name), request, ignore_reply, None)
        except TailraceError as refusal:
            if refusal.retry_after_s is None:
                raise
            await asyncio.sleep(SNAPSHOT_RETRY_S)  # memory is full until a checkpoint has come through
        else:
            await log.committer.drain()
            return
