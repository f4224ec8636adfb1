"""What a bootstrap has done so far: a bar for people who watch, lines in the log for everybody else."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

logger = logging.getLogger("tailrace.bootstrap")

PROBLEMS_MAX = 100
LINE_S = 5.0
BAR_S = 0.2


class BootstrapReport(msgspec.Struct):
    """Counts, and what could not be restored as it was."""

    found: int = 0  # manifests, those of deleted streams included
    done: int = 0
    streams: int = 0
    forks: int = 0
    tombstones: int = 0
    segments: int = 0
    entries: int = 0
    payload_bytes: int = 0
    producers: int = 0
    subscriptions: int = 0
    seconds: float = 0.0
    problems_count: int = 0
    problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)
            logger.warning("bootstrap: %s", text)

    def summary(self) -> str:
        return (
            f"restored {self.streams} streams ({self.forks} of them forks) with {self.entries} entries and "
            f"{self.payload_bytes} bytes in {self.segments} segments, {self.tombstones} tombstones, "
            f"{self.producers} producers and {self.subscriptions} subscriptions in {self.seconds:.1f} s; "
            f"{self.problems_count} could not be restored as they were"
        )


@asynccontextmanager
async def show_progress(restored: BootstrapReport) -> AsyncGenerator[None]:
    """Shows the counts while they grow."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    work = _draw_progress_bar(restored) if sys.stderr.isatty() else _log_progress(restored)
    task = loop.create_task(work)
    try:
        yield
    finally:
        restored.seconds = loop.time() - begun_s
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _log_progress(restored: BootstrapReport) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        logger.info(
            "bootstrap: %d of %d manifests, %d entries, %d bytes",
            restored.done,
            restored.found,
            restored.entries,
            restored.payload_bytes,
        )


async def _draw_progress_bar(restored: BootstrapReport) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("restoring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("streams", total=None, more="")

        def draw() -> None:
            more = f"{restored.entries:,} entries, {restored.payload_bytes / 1e6:,.1f} MB"
            progress.update(task, completed=restored.done, total=restored.found or None, more=more)

        try:
            while True:
                await asyncio.sleep(BAR_S)
                draw()
        finally:
            draw()
