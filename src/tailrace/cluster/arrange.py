"""Before workers start: the data directory is made to fit their number."""

from __future__ import annotations

import logging
import time

from tailrace.cluster.layout import (
    Layout,
    create_worker_directories,
    is_unused_directory,
    read_layout,
    refuse_leftover_generation,
    remove_other_generations,
    write_layout,
)
from tailrace.cluster.migrate import migrate_streams
from tailrace.common import failpoints
from tailrace.common.settings import Settings
from tailrace.storage.data_directory import DataDirectory

logger = logging.getLogger("tailrace.workers")


def prepare_layout(settings: Settings, root: DataDirectory) -> Layout:
    """The layout to start with. Killed at any moment, it leaves the old one or the new one."""
    present = read_layout(root.path)
    remove_other_generations(root.path, present)
    if present.workers == settings.workers:
        create_worker_directories(root.path, present, root.deployment)
        return present
    wanted = Layout(workers=settings.workers, generation=present.generation + 1)
    refuse_leftover_generation(root.path, wanted)
    create_worker_directories(root.path, wanted, root.deployment)
    if not all(is_unused_directory(present.path(root.path, index)) for index in range(present.workers)):
        begun_s = time.monotonic()
        count = migrate_streams(root.path, present, wanted, settings.limits.tombstone_ms)
        logger.info(
            "%d streams of %d workers were given to %d in %.1f s",
            *(count, present.workers, wanted.workers, time.monotonic() - begun_s),
        )
    root.become_shared()
    write_layout(root.path, wanted)
    failpoints.reached("workers.after_switch")
    remove_other_generations(root.path, wanted)
    return wanted
