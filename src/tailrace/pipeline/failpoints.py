"""Places where a test may kill a part of the pipeline, to see that nothing is lost, doubled or half there.

`TAILRACE_PIPELINE_FAILPOINT=worker:mid_build:/some/file` kills a Python worker the first time that step is
reached by anybody who can create the file. The file is what lets the next attempt pass. The part is `driver`,
`worker` or `jvm`, the one the reaching process belongs to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final, Literal

NAMES: Final = (
    "after_fetch",
    "mid_build",
    "after_write",
    "after_put",
    "before_publish",
    "after_publish",
    "after_checkpoint",
)
VARIABLE: Final = "TAILRACE_PIPELINE_FAILPOINT"


def reached(name: str, role: Literal["driver", "worker"]) -> None:
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert name in NAMES, name
    part, chosen, path = wanted.split(":", 2)
    if chosen != name or part not in (role, "jvm") or (part == "jvm" and role == "driver"):
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    victim = os.getpid() if part == role else _parent(os.getppid())
    os.kill(victim, signal.SIGKILL)


def _parent(pid: int) -> int:
    """The JVM has started a daemon, which has started the worker."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
