"""Listing streams in name order, and republishing `__registry__` from that list after a restore.

Listing streams: a merge of two ordered sources, the hot store's name index and what changed since.

`__registry__` after a loss: what it told last may be missing, so it tells everything again.

A reset says that what readers have made of it so far counts no more; then follow all streams there are. That
this is due is a fact of the log, so a server that is killed meanwhile begins again. Of several logs each
tells of its own streams, and only the one that has `__registry__` itself says when that begins.
"""

from __future__ import annotations

import asyncio
from typing import Final

import orjson

from tailrace.common.errors import TailraceError
from tailrace.log import system_streams
from tailrace.log.decide import AppendRequest
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.transaction import ignore_reply


def list_streams(log: Log, after: str, prefix: str, limit: int, system: bool) -> list[Stream]:
    """Up to `limit` streams in byte order of their names. The cost grows with the limit, not with the log."""
    now_ns = log.clock.now_ns()
    found: list[Stream] = []
    while len(found) < limit:
        names, exhausted = _names_after(log, after, prefix, limit - len(found) + 1)
        for name, stored in names:
            after = name
            if not system and (name.startswith(("__", "hub/"))):
                continue
            stream = log.streams.by_name.get(name) or stored
            if stream is None or stream.gone or stream.visible < 0 or stream.expired(now_ns):
                continue
            found.append(stream)
            if len(found) == limit:
                break
        if exhausted:
            break
    return found


def _names_after(
    log: Log, after: str, prefix: str, limit: int
) -> tuple[list[tuple[str, Stream | None]], bool]:
    """The next names of either source; a stored stream comes with its image, one in memory without."""
    streams = log.streams
    merged: dict[str, Stream | None] = {}
    rows = log.store.db.images_after(after, prefix, limit)
    for name, image in rows:
        if name.startswith(prefix) and name not in streams.changed_names:
            merged[name] = None if name in streams.by_name else log.store.load_stream(image)
    begin = max(after, prefix)
    taken = 0
    for name in streams.changed_names.irange(begin):
        if not name.startswith(prefix) or taken >= limit:
            break
        if name > after:
            merged[name] = None
            taken += 1
    ordered = sorted(merged.items())
    # A source that was cut at the limit may have more in between; only names up to its cut are complete.
    cuts = [rows[-1][0]] if len(rows) == limit else []
    if taken >= limit:
        cuts.append(max(name for name in merged if name in streams.changed_names))
    if cuts:
        bound = min(cuts)
        ordered = [(name, stream) for name, stream in ordered if name <= bound]
    past_prefix = bool(rows) and not rows[-1][0].startswith(prefix)
    return ordered, not cuts or (past_prefix and taken < limit)


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
        await _append_messages(
            log, [system_streams.registry_snapshot_entry(stream, now_ns) for stream in page]
        )
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
