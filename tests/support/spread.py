"""How tests are spread over workers."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from xdist.scheduler import LoadScopeScheduling

SPARK = ("tests", "spark")  # each session costs seconds and a gigabyte


def _spark_group(nodeid: str) -> str | None:
    """Tests that share a Spark session: those of the source and sink, and those of the jobs below them."""
    folder = PurePosixPath(nodeid.partition("::")[0]).parent
    if folder.parts[:2] != SPARK:
        return None
    return "spark" if folder.parts == SPARK else "spark jobs"


class ByFile(LoadScopeScheduling):
    """One file after the other, in the order in which they were collected."""

    def __init__(self, config: Any, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return _spark_group(nodeid) or nodeid.partition("::")[0]


def longest_first(items: list[Any]) -> None:
    """What goes to one worker as a whole is begun first, so that nobody waits for it at the end."""
    items.sort(key=lambda item: _spark_group(item.nodeid) is None)
