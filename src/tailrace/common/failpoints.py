"""Places where a test can kill the server, to check that a crash there neither loses nor duplicates data.

`TAILRACE_FAILPOINT=seal.after_upload:2` kills the process the second time that step is reached, as abruptly
as SIGKILL; a child process also kills the server. Without the variable a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Final

NAMES: Final = (
    "seal.before_write",
    "seal.after_write",
    "seal.before_upload",
    "seal.after_upload",
    "seal.before_manifest",
    "seal.after_manifest",
    "seal.before_trim",
    "seal.after_trim",
    "publish.before_manifest",
    "publish.after_manifest",
    "publish.after_journal",
    "compact.after_intent",
    "compact.before_manifest",
    "compact.after_manifest",
    "compact.after_journal",
    "retain.before_trim",
    "retain.after_trim",
    "retain.before_manifest",
    "gc.before_delete",
    "gc.after_delete",
    "gc.before_sweep",
    "gc.after_sweep",
    "gc.before_forget",
    "bootstrap.after_claim",
    "bootstrap.after_list",
    "bootstrap.after_take",
    "bootstrap.after_batch",
    "bootstrap.before_rename",
    "bootstrap.after_rename",
    "workers.after_fold",
    "workers.before_switch",
    "workers.after_switch",
    "hub.before_message",
    "hub.after_message",
    "hub.before_cursor",
    "hub.after_cursor",
    "hub.before_letter",
    "hub.after_letter",
    "hub.before_registration",
    "hub.after_registration",
    "hub.before_subscription",
    "hub.after_subscription",
    "hub.before_publish",
    "hub.before_batch",
    "hub.before_broadcast_ack",
)
EXIT_CODE: Final = 137

_name, _, _count = os.environ.get("TAILRACE_FAILPOINT", "").partition(":")
ARMED: Final = bool(_name)  # for hot paths where even a call would cost too much
_left = int(_count or 1)
_server = 0  # parent process to kill as well


def mark_child_process() -> None:
    """Must be called first in a child process of the server."""
    global _server
    _server = os.getppid()


def reached(name: str) -> None:
    if not _name:
        return
    global _left
    assert name in NAMES, name
    if name == _name:
        _left -= 1
        if _left == 0:
            if _server:
                os.kill(_server, signal.SIGKILL)
            os._exit(EXIT_CODE)
