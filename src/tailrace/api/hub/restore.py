"""Start-up: the hub's streams are read from beginning to end."""

from __future__ import annotations

from typing import Final

from tailrace.api.hub.storage import LogStreams
from tailrace.hub.cursors import STREAM as CURSORS
from tailrace.hub.presence import REGISTRY
from tailrace.hub.restoring import Restoring
from tailrace.hub.state import Hub
from tailrace.hub.topics import STREAM as SUBSCRIPTIONS
from tailrace.log.listing import list_streams
from tailrace.log.log import Log

TOPICS: Final = "hub/topic/"
NAMES_AT_ONCE: Final = 1000


async def restore(hub: Hub, streams: LogStreams, log: Log, now_ms: int) -> None:
    restoring = Restoring(hub)
    _topics(hub, log)
    for name, take in (
        (REGISTRY, restoring.registry),
        (SUBSCRIPTIONS, restoring.subscription),
        (CURSORS, restoring.cursor),
    ):
        async for body in streams.all_of(name):
            take(body)
    restoring.finish(now_ms)


def _topics(hub: Hub, log: Log) -> None:
    after = TOPICS
    while True:
        listed = list_streams(log, after, TOPICS, NAMES_AT_ONCE, system=True)
        for stream in listed:
            hub.topics.kept.add(stream.name[len(TOPICS) :])
        if len(listed) < NAMES_AT_ONCE:
            return
        after = listed[-1].name
