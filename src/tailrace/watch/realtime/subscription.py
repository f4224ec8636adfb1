"""A subscription: one query of one connection, and how far it has come."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from tailrace.watch.matcher import Interest
from tailrace.watch.query import Query

if TYPE_CHECKING:
    from tailrace.watch.realtime.session import RealtimeSession
    from tailrace.watch.realtime.watched import WatchedCollection

# live: told of every change as it happens. behind: reads from the log at its own pace. snapshot: is sent what
# there is. paused: has as many events unacknowledged as it wants. invalid: has to be subscribed again.
SubscriptionState = Literal["live", "behind", "snapshot", "paused", "invalid"]
PRIORITIES: Final = ("low", "normal", "high")


class SubscriptionOptions:
    __slots__ = ("auto_resync", "include_data", "max_unacked", "priority", "snapshot")

    def __init__(self) -> None:
        self.snapshot = False
        self.include_data = True
        self.priority = "normal"
        self.auto_resync = False
        self.max_unacked = 0


class Subscription:
    """`positions` is what the client has as long as it is not live; then it is what the collection has."""

    __slots__ = (
        "digest",
        "id",
        "interest",
        "newer",
        "options",
        "own",
        "principal",
        "query",
        "query_hash",
        "session",
        "state",
        "task",
        "told",
        "unacked",
        "watched",
        "written",
    )

    def __init__(
        self,
        session: RealtimeSession,
        sub_id: str,
        query: Query,
        options: SubscriptionOptions,
        watched: WatchedCollection,
        interest: Interest,
    ) -> None:
        self.session = session
        self.id = sub_id
        self.query = query
        self.options = options
        self.watched = watched
        self.interest = interest
        self.query_hash = b""
        self.digest = b""  # of the read rule and what it sees of the asker
        self.state: SubscriptionState = "behind"
        self.own: list[int] = []
        self.newer: dict[str, int] | None = None  # rows of a snapshot that are newer than where it began
        self.told = -1  # sum of the positions at the last token
        self.unacked: deque[tuple[int, int]] = deque()
        self.task: asyncio.Task[None] | None = None
        self.principal: str | None = None  # who it counts for
        self.written = 0  # entry of the summaries by which jobs know of it; 0: they do not

    @property
    def key(self) -> str:
        """What jobs beside the gateway call it."""
        return f"{self.session.id}/{self.id}"

    @property
    def positions(self) -> list[int]:
        return self.watched.applied if self.state == "live" else self.own

    def acknowledge(self, positions: dict[int, int]) -> None:
        """Everything up to these was applied by the client; never moves back."""
        self.unacked = deque(
            (partition, seq) for partition, seq in self.unacked if seq > positions.get(partition, 0)
        )

    @property
    def full(self) -> bool:
        return 0 < self.options.max_unacked <= len(self.unacked)
