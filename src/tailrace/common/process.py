"""The process itself: exit without interpreter teardown, CPU time slices and I/O priority.

Exit: threads of the object store library may call into Python while it finalises, which aborts the process
although its work is done. So the process ends without finalisation.

CPU time slices: since Linux 6.12 a process can request the length of its time slice, and one with a short
slice is scheduled sooner when it wakes up. A server wakes up for every request and computes for microseconds;
beside other busy programs it would otherwise wait for the end of their slices. Its share of the CPU does not
change. On other systems these calls do nothing.
"""

from __future__ import annotations

import atexit
import os
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

EXIT_INTERRUPTED: Final = 130


def run_and_exit(program: Callable[[], int]) -> None:
    """Run a whole program and end this process with its exit code."""
    code = 1  # an unexpected exception

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader is gone
                stream.flush()
        os._exit(code)

    atexit.register(end)  # registered first, so that it is called last
    try:
        code = program()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise


# System call numbers by machine; the C library has no functions for them.
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_CLASS_IDLE: Final = 3 << 13  # this class has no levels
# size, policy, flags, niceness, priority, time slice in ns, and two for deadlines
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQ")
_DEFAULT_SLICE_US: Final = 0
# For processes that the server needs within a bounded time: about a tenth of a contended core.
HELPER_NICENESS: Final = 10


def set_time_slice(slice_us: int) -> None:
    """Set the time slice of this thread, and of threads and processes that it starts afterwards.

    A process started under a policy other than the default one is left unchanged.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, niceness, 0, slice_us * 1000, 0, 0)
    _syscall(_SCHED_SETATTR, 0, attributes, 0)


def lower_cpu_priority(niceness: int = HELPER_NICENESS) -> None:
    """For a helper process: yield to the server, with the default time slice."""
    os.nice(niceness)
    set_time_slice(_DEFAULT_SLICE_US)


def set_idle_io_priority() -> None:
    """For a helper process whose work can wait: use the disk only when it is idle."""
    if sys.platform == "linux":
        _syscall(_IOPRIO_SET, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE)


def _syscall(numbers: Mapping[str, int], *arguments: int | bytes) -> None:
    """Make a system call; errors are ignored because these calls are optional."""
    import ctypes  # imported here to keep the command line's start-up fast
    import platform

    number = numbers.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, *arguments)
