"""The context that all routes share."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tailrace.common.clock import Clock
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.log.log import Log


class Context(NamedTuple):
    """The components of the server, assembled at start-up."""

    settings: Settings
    log: Log
    clock: Clock
    loop: asyncio.AbstractEventLoop
    telemetry: ServerMetrics
    deployment: str  # created with the data directory; distinguishes servers

    @property
    def limits(self) -> Limits:
        return self.settings.limits
