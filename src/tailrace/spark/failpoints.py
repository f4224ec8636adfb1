"""Failpoints: steps at which a test kills a process of the pipeline, to check that nothing is lost or twice.

`TAILRACE_PIPELINE_FAILPOINT=worker:mid_build:/some/file` kills the Python worker that reaches the step
`mid_build` first. It creates the file before, and a process that finds the file does not kill: the next
attempt passes. The first part is `driver`, `worker` or `jvm`, of the process tree that reaches the step; a
step of the driver cannot kill a worker.
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
    setting = os.environ.get(FAILPOINT_VARIABLE)
    if not setting:
        return
    assert name in FAILPOINTS, name
    part, enabled, path = setting.split(":", 2)
    if enabled != name or (part, role) == ("worker", "driver"):
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(_process_to_kill(part, role), signal.SIGKILL)


def _process_to_kill(part: str, role: str) -> int:
    """The pid of the part. The driver starts a JVM, the JVM a daemon, and the daemon the workers."""
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
            continue  # not a process, or it has exited
    raise AssertionError("this driver has no JVM")


def _parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
