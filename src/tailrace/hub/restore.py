"""Start-up: the hub's streams are read from beginning to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.hub.addresses import TOPIC_PREFIX
from tailrace.hub.boxes import BROADCAST_STREAM
from tailrace.hub.cursors import CURSORS_STREAM as CURSORS
from tailrace.hub.dead_letters import DEAD_LETTERS_STREAM as LETTERS
from tailrace.hub.presence import REGISTRY_STREAM
from tailrace.hub.restoring import MESSAGE_STREAMS, HubRestore
from tailrace.hub.state import Hub
from tailrace.hub.storage import PAGE_BYTES, PAGE_ENTRIES, LogStreams
from tailrace.hub.topics import SUBSCRIPTIONS_STREAM as SUBSCRIPTIONS
from tailrace.log.listing import list_streams
from tailrace.log.log import Log

NAMES_AT_ONCE: Final = 1000
# Positions are written a fraction of a second after what moved them; a process that hardly ran may take
# longer.
UNFLUSHED_NS: Final = 60 * 10**9


async def restore_hub(hub: Hub, streams: LogStreams, log: Log, now_ms: int) -> None:
    restoring = HubRestore(hub)
    _restore_topics(hub, log)
    for name, take in (
        (REGISTRY_STREAM, restoring.registry),
        (SUBSCRIPTIONS, restoring.subscription),
        (CURSORS, restoring.cursor),
    ):
        async for body in streams.all_of(name):
            take(body)
    restoring.finish(now_ms)
    await _replay_last(streams, BROADCAST_STREAM, restoring.broadcast)
    await _replay_last(streams, LETTERS, lambda _, body: restoring.letter(body))
    await _restore_messages(restoring, streams, log, (now_ms - hub.limits.hub_seen_ttl_ms) * 1_000_000)


async def _replay_last(streams: LogStreams, name: str, take: Callable[[int, bytes], None]) -> None:
    """The last entries: the positions behind them may not have been written when the process died."""
    stream = streams.find(name)
    if stream is None:
        return
    after, since = stream.earliest, stream.last_ns - UNFLUSHED_NS
    while after < stream.visible:
        found = await streams.read(stream, after, PAGE_ENTRIES, PAGE_BYTES, since or None)
        if found.error is not None or not found.entries:
            break
        for number, _, body in found.entries:
            take(number, body)
        after, since = found.next_entry, 0


async def _restore_messages(restoring: HubRestore, streams: LogStreams, log: Log, since_ns: int) -> None:
    """What was accepted a moment ago is in the journal, so its streams are in memory."""
    recent = [
        stream
        for name, stream in list(log.streams.by_name.items())
        if name.startswith(MESSAGE_STREAMS) and stream.last_ns >= since_ns and stream.visible > 0
    ]
    for stream in recent:
        after, since = stream.earliest, since_ns
        while after < stream.visible:
            found = await streams.read(stream, after, PAGE_ENTRIES, PAGE_BYTES, since or None)
            if found.error is not None or not found.entries:
                break
            for number, time_ns, body in found.entries:
                restoring.message(stream.name, number, time_ns, body)
            after, since = found.next_entry, 0


def _restore_topics(hub: Hub, log: Log) -> None:
    after = TOPIC_PREFIX
    while True:
        listed = list_streams(log, after, TOPIC_PREFIX, NAMES_AT_ONCE, system=True)
        for stream in listed:
            hub.topics.kept.add(stream.name[len(TOPIC_PREFIX) :])
        if len(listed) < NAMES_AT_ONCE:
            return
        after = listed[-1].name
