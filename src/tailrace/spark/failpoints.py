"""Places where a test may kill a part of the pipeline, to see that nothing is lost, doubled or half there.

`TAILRACE_PIPELINE_FAILPOINT=worker:mid_build:/some/file` kills a Python worker the first time that step is
reached by anybody who can create the file. The file is what lets the next attempt pass. The part is `driver`,
`worker` or `jvm`: those of the process that reaches the step. A driver has no worker that could be meant.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final, Literal

FAILPOINTS: Final = (
    "after_fetch",
    "mid_build",
    "after_write",
    "after_put",
    "before_publish",
    "after_publish",
    "after_checkpoint",
)
FAILPOINT_VARIABLE: Final = "TAILRACE_PIPELINE_FAILPOINT"


def hit_failpoint(name: str, role: Literal["driver", "worker"]) -> None:
    wanted = os.environ.get(FAILPOINT_VARIABLE)
    if not wanted:
        return
    assert name in FAILPOINTS, name
    part, chosen, path = wanted.split(":", 2)
    if chosen != name or (part, role) == ("worker", "driver"):
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(_process_to_kill(part, role), signal.SIGKILL)


def _process_to_kill(part: str, role: str) -> int:
    """The driver has started a JVM, which has started a daemon, which has started the worker."""
    if part == role:
        return os.getpid()
    if role == "driver":
        return _find_jvm(os.getpid())
    jvm = _parent_pid(os.getppid())
    return jvm if part == "jvm" else _parent_pid(jvm)


def _find_jvm(pid: int) -> int:
    for entry in Path("/proc").iterdir():
        try:
            if (entry / "comm").read_text() == "java\n" and _parent_pid(int(entry.name)) == pid:
                return int(entry.name)
        except OSError:
            continue  # no process, or one that has ended meanwhile
    raise AssertionError("this driver has no JVM")


def _parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
