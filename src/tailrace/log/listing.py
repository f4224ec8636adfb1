"""Listing streams in name order, and republishing `__registry__` from that list after a restore.

A listing merges two ordered sources: the hot store's name index and the names changed since the checkpoint.

After a restore the last messages of `__registry__` may be missing, so it is published again: a `reset`, which
makes readers discard their state, then all streams. That this is due is a fact of the log, so a server
that is killed in between starts over. With several logs each publishes its own streams; the control messages
are written only by the log without a suffix.
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
    """Up to `limit` streams in byte order of their names. The cost depends on the limit, not on the log."""
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
    """The next names of both sources, with the stream if it is only in the hot store; whether that is all."""
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
    # A source that reached the limit may have more names: the merge is complete up to its last name only.
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
    """Publishes the registry again if that is due; returns when it is durable."""
    if REGISTRY_SNAPSHOT_DUE not in log.streams.meta or log.refusal is not None:
        return
    is_whole = not log.own_suffix
    if is_whole:
        await _append_messages(log, [_control_message("reset"), _control_message("snapshot-start")])
    after = ""
    while page := list_streams(log, after, "", SNAPSHOT_PAGE_COUNT, system=False):
        now_ns = log.clock.now_ns()
        # No await between listing and append: the message of a later deletion comes later.
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
            log.append(log.existing(log.system_streams.registry_name), request, ignore_reply, None)
        except TailraceError as refusal:
            if refusal.retry_after_s is None:
                raise
            await asyncio.sleep(SNAPSHOT_RETRY_S)  # memory is full until the next checkpoint
        else:
            await log.committer.drain()
            return
