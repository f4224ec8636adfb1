"""The process itself: exit without interpreter teardown, CPU time slices and I/O priority.

The end of a process of ours: everything is tidied up, but the interpreter is not taken apart.

Threads of the object store's library may be about to tell Python of something that has ended. Python, once it
finalises, ends such a thread in a way that the library's language does not survive: the process would abort
although its work is done.

Turns of the processor and of the disk: a server gets its turn soon, and whoever helps it waits.

Linux 6.12 and newer let a process say how long its turns are to be, and whoever asks for short ones is let in
sooner when it wakes up. A server wakes up for every request and computes for microseconds; where other
programs compute on the same cores, it would otherwise wait until a turn of theirs is over. Nobody gets more
of the processor by this. Other systems are asked for nothing, and nothing depends on it.
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
    """Run a whole program and end this process with the exit code that it gives."""
    code = 1  # a bug, unless the program says otherwise

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)

    atexit.register(end)  # before all others, so that it is called after them
    try:
        code = program()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise


# By machine; the C library has no functions for these.
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_CLASS_IDLE: Final = 3 << 13  # a class of its own, in which there are no levels
# size, policy, flags, niceness, priority, length of a turn in ns, and two for deadlines
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQ")
_DEFAULT_SLICE_US: Final = 0
# Of processes that a server cannot do without for long: a tenth of a core that it wants all of.
HELPER_NICENESS: Final = 10


def set_time_slice(turn_us: int) -> None:
    """Holds for this thread, and for the threads and processes that it begins afterwards.

    Whoever was started under another policy than the usual one keeps it: somebody has thought about it.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, niceness, 0, turn_us * 1000, 0, 0)
    _syscall(_SCHED_SETATTR, 0, wanted, 0)


def lower_cpu_priority(niceness: int = HELPER_NICENESS) -> None:
    """In a helper: what the server asked for is not for it, and the server comes first."""
    os.nice(niceness)
    set_time_slice(_DEFAULT_SLICE_US)


def set_idle_io_priority() -> None:
    """In a helper whose work can wait: read and write when nobody else does, where disks have such turns."""
    if sys.platform == "linux":
        _syscall(_IOPRIO_SET, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE)


def _syscall(numbers: Mapping[str, int], *arguments: int | bytes) -> None:
    """One that knows no such thing says so, and that is all."""
    import ctypes  # the command line should not load it at every start
    import platform

    number = numbers.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, *arguments)
