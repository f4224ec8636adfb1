"""A bar for whoever watches a pipeline at a terminal: how much of the backlog is built, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from tailrace.pipeline.status import Status


class ProgressBar:
    """One line for each kind of job. `backlog` tells how many segments wait, more than one batch takes."""

    def __init__(self, backlog: Callable[[], int], to: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Drawn

        self._backlog = backlog
        console = Console(stderr=True) if to is None else Console(file=to, force_terminal=True, width=100)
        self._console: Console = console
        columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
        self._drawn = Drawn(
            *columns, TextColumn("{task.fields[words]}"), TimeElapsedColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, int] = {}

    def starting(self, master: str) -> None:
        self._console.print(f"starting Spark at {master}, which takes some seconds …", style="dim")

    def batch(self, job: str, count: int) -> None:
        waiting = max(count, self._backlog()) if job == "companions" else count
        total = self._done.setdefault(job, 0) + waiting
        if job in self._tasks:
            self._drawn.update(self._tasks[job], total=total)
        else:
            self._tasks[job] = self._drawn.add_task(job, total=total, words="")
        self._drawn.start()

    def advance(self, job: str, status: Status) -> None:
        self._done[job] += 1
        words = _words(status) if job == "companions" else ""
        self._drawn.update(self._tasks[job], completed=self._done[job], words=words)

    def done(self, status: Status) -> None:
        """What is to be seen when the bar is not: the next batch may be hours away."""
        self._drawn.stop()
        totals = status.totals
        given_up = f", {totals.quarantined} segments given up" if totals.quarantined else ""
        self._console.print(f"{totals.segments} segments: {_words(status)}{given_up}")


def _words(status: Status) -> str:
    totals = status.totals
    return (
        f"{totals.rows:,} entries, {totals.bytes_in >> 20:,} MiB read, {totals.bytes_out >> 20:,} MiB written"
    )
