"""How tests are spread over workers."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from xdist.scheduler import LoadScopeScheduling

TOGETHER = frozenset({"spark", "pipeline"})  # each session costs seconds and a gigabyte


class ByFile(LoadScopeScheduling):
    """One file after the other, in the order in which they were collected."""

    def __init__(self, config: Any, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        directory = PurePosixPath(file).parent.name
        return directory if directory in TOGETHER else file


def longest_first(items: list[Any]) -> None:
    """What goes to one worker as a whole is begun first, so that nobody waits for it at the end."""
    items.sort(key=lambda item: item.path.parent.name not in TOGETHER)
