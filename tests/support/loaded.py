"""The process behind `forked`: it has loaded what a server and its commands load, and does nothing but fork.

A message is one command: its arguments, variables and directory as JSON, with four descriptors. Three
become the command's standard streams; the fourth is told the id of the process, and how it ended.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import socket
import struct
import sys
from typing import Final, cast

MODULES: Final = (
    "tailrace.server.process",
    "tailrace.cli.app",
    "tailrace.cli.serve",
    "tailrace.client",
    "tailrace.storage.segments.reader",
)
FAILPOINTS: Final = "tailrace.common.failpoints"
MESSAGE_BYTES_MAX: Final = 128 * 1024
NUMBER: Final = struct.Struct("<q")

Command = tuple[list[str], dict[str, str], str]  # arguments, variables, directory


class Forks:
    """The processes that were forked, until they have ended and that was told."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._running: dict[int, tuple[int, int]] = {}  # id and whom to tell, by the descriptor of a process
        self._events = select.poll()
        self._events.register(asked, select.POLLIN)

    def serve(self) -> list[str] | None:
        """In every process that is forked: its arguments. In this one: None, when nobody asks any more."""
        while True:
            for descriptor, _ in self._events.poll():
                if descriptor in self._running:
                    self._tell_end(descriptor)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._asked, MESSAGE_BYTES_MAX, 4)
                if not message:
                    return None
                if self._fork(descriptors):
                    arguments, variables, directory = cast("Command", json.loads(message))
                    self._become(variables, directory, descriptors)
                    return arguments

    def _fork(self, descriptors: list[int]) -> bool:
        """Whether this is the new process."""
        pid = os.fork()
        if pid == 0:
            return True
        *streams, told = descriptors
        for stream in streams:
            os.close(stream)
        os.write(told, NUMBER.pack(pid))
        handle = os.pidfd_open(pid)
        self._running[handle] = (pid, told)
        self._events.register(handle, select.POLLIN)
        return False

    def _tell_end(self, handle: int) -> None:
        pid, told = self._running.pop(handle)
        self._events.unregister(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        try:
            os.write(told, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        except BrokenPipeError:
            pass  # nobody wants to know
        os.close(told)

    def _become(self, variables: dict[str, str], directory: str, descriptors: list[int]) -> None:
        """What a fresh process finds: a session, streams, a directory and variables of its own."""
        os.setsid()
        for number in range(3):
            os.dup2(descriptors[number], number)
        self._asked.detach()  # its number will be another file's
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
        # What is read while modules and libraries are loaded has to be read again.
        importlib.reload(importlib.import_module(FAILPOINTS))
        if "FAULTS_CONTROL" in variables:
            ctypes.CDLL(None).faults_attach()


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    arguments = Forks(socket.socket(fileno=int(sys.argv[1]))).serve()
    if arguments is not None:
        from tailrace.cli import main as run

        sys.argv = ["tailrace", *arguments]
        run()


if __name__ == "__main__":
    main()
