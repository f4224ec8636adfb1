"""What every route works with."""

from __future__ import annotations

import asyncio

from tailrace.clock import Clock
from tailrace.limits import Limits
from tailrace.log.log import Log
from tailrace.settings import Settings


class Context:
    """The server's parts, put together once at start-up."""

    __slots__ = ("clock", "deployment", "limits", "log", "loop", "settings")

    def __init__(
        self, settings: Settings, log: Log, clock: Clock, loop: asyncio.AbstractEventLoop, deployment: str
    ) -> None:
        self.settings = settings
        self.limits: Limits = settings.limits
        self.log = log
        self.clock = clock
        self.loop = loop
        self.deployment = deployment  # made with the data directory; tells two servers apart
