"""What several workers need of their bucket before they start: done once, for all of them.

A bootstrap fills the data directory as it does for a single process; the streams are shared out afterwards,
as they are whenever the number of workers changes. A bucket is taken over for the streams of all workers:
each of them alone would find those of the others and call them strangers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import ExitStack

from tailrace.cluster.layout import Layout, read_layout
from tailrace.cluster.migrate import fold_journal
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.log.stored_streams import StoredStreams
from tailrace.server.restore import restore_from_bucket
from tailrace.storage.bootstrap import BootstrapReport, is_bootstrapped
from tailrace.storage.data_directory import DataDirectory
from tailrace.storage.object_store.interface import ObjectStoreError, open_object_store
from tailrace.storage.ownership import BucketOwnership, refuse_foreign_streams

logger = logging.getLogger("tailrace.workers")


async def bootstrap_from_bucket(settings: Settings, root: DataDirectory) -> BootstrapReport | None:
    """None if the process is to stop before all is restored; then nothing counts yet."""
    present = read_layout(root.path)
    if present.generation:
        if not all(is_bootstrapped(present.path(root.path, index)) for index in range(present.workers)):
            raise TailraceError(
                "unavailable",
                f"--bootstrap needs a data directory without streams, and {root.path} has workers; to go on "
                "with what is there, start without --bootstrap",
            )
        logger.warning("the bootstrap was finished before; starting from what it restored")
        return BootstrapReport()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await restore_from_bucket(settings, root, stop)


async def claim_bucket(settings: Settings, root: DataDirectory, layout: Layout) -> None:
    """The bucket becomes ours, if all that is in it is known to one of the workers."""
    with ExitStack() as opened:
        stores: list[StoredStreams] = []
        for index in range(layout.workers):
            path = layout.path(root.path, index)
            # A worker whose supervisor was killed may still be at its end.
            opened.callback(DataDirectory(path).close)
            fold_journal(path, settings.limits.tombstone_ms).close()
            stores.append(StoredStreams(path / "hot.db"))
            opened.callback(stores[-1].db.close)
        try:
            objects = open_object_store(settings.object_store_url, limits=settings.limits)
            try:
                ownership = BucketOwnership(objects)
                owner = await ownership.current()
                if owner is None or owner.deployment != root.deployment:
                    await refuse_foreign_streams(objects, stores)
                await ownership.claim(root.deployment, take_over=True)
            finally:
                await objects.close()
        except (ValueError, ObjectStoreError) as error:
            raise TailraceError("unavailable", f"the object store cannot be taken over: {error}") from error
