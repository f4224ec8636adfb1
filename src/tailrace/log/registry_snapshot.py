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
from tailrace.log.transaction import ignore

DUE: Final = "registry/snapshot-due"
PAGE_COUNT: Final = 500
RETRY_S: Final = 0.2


async def tell_again(log: Log) -> None:
    """Returns when it is durable. Does nothing unless it is due."""
    if DUE not in log.streams.meta or log.refusal is not None:
        return
    is_whole = not log.own_suffix
    if is_whole:
        await _append(log, [_control("reset"), _control("snapshot-start")])
    after = ""
    while page := list_streams(log, after, "", PAGE_COUNT, system=False):
        now_ns = log.clock.now_ns()
        # Nothing comes between the look and the append: a stream deleted later is told so later.
        await _append(log, [registry.present(stream, now_ns) for stream in page])
        after = page[-1].name
    if is_whole:
        await _append(log, [_control("snapshot-end")])
    log.put_meta(DUE, None)
    await log.committer.drain()


def _control(kind: str) -> bytes:
    return orjson.dumps({"headers": {"control": kind}})


async def _append(log: Log, messages: list[bytes]) -> None:
    request = AppendRequest(b",".join(messages), "application/json", lengths=[len(one) for one in messages])
    while True:
        try:
            log.append(log.existing(log.own.registry_name), request, ignore, None)
        except TailraceError as refusal:
            if refusal.retry_after_s is None:
                raise
            await asyncio.sleep(RETRY_S)  # memory is full until a checkpoint has come through
        else:
            await log.committer.drain()
            return
