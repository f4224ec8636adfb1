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
        if directory in TOGETHER:
            return directory
        return nodeid if directory == "conformance" else file  # its tests take minutes, and share nothing


def longest_first(items: list[Any]) -> None:
    """The public suite first, by itself: it minds the clock. Then what goes to one worker as a whole."""
    items.sort(key=lambda item: _turn(item.path.parent.name))


def _turn(directory: str) -> int:
    return 0 if directory == "conformance" else 1 if directory in TOGETHER else 2
