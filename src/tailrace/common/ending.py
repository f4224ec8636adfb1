"""The end of a process of ours: everything is tidied up, but the interpreter is not taken apart.

Threads of the object store's library may be about to tell Python of something that has ended. Python, once it
finalises, ends such a thread in a way that the library's language does not survive: the process would abort
although its work is done.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
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
