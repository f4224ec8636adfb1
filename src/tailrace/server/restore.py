"""`--bootstrap`: before there is a server, its data directory is filled from the object store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tailrace.common.clock import SYSTEM_CLOCK
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.storage.data_directory import DataDirectory

if TYPE_CHECKING:
    from tailrace.storage.bootstrap import BootstrapReport


async def restore_from_bucket(
    settings: Settings, directory: DataDirectory, stop: asyncio.Event
) -> BootstrapReport | None:
    """What was restored; None if nobody asked, or if the process is to stop before it is done."""
    if not settings.bootstrap:
        return None
    from tailrace.storage.bootstrap import bootstrap

    work = asyncio.create_task(bootstrap(settings, directory, SYSTEM_CLOCK))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return None


def record_restore(restored: BootstrapReport, telemetry: ServerMetrics) -> None:
    telemetry.bootstraps.value += 1
    telemetry.bootstrap_seconds.value = restored.seconds
    telemetry.bootstrap_problems.value = restored.problems_count
    for kind in ("streams", "tombstones", "segments", "entries", "producers", "subscriptions"):
        telemetry.bootstrap_restored.values[(kind,)] = getattr(restored, kind)
    telemetry.bootstrap_restored.values[("bytes",)] = restored.payload_bytes
