"""The server asks for short turns of the processor, and its helpers for none.

Where the kernel knows no such thing, everything runs as before: then each turn here is 0.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.server import ServerProcess
from tailrace.common import process

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def turn_us(task: int) -> int:
    told = ctypes.create_string_buffer(ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR, task, told, ATTRIBUTES.size, 0) == 0
    return ATTRIBUTES.unpack(told.raw)[5] // 1000


def tasks(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def helpers(server: ServerProcess) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]


def supported(wanted_us: int) -> int:
    """What a process gets that asks for such turns: nothing, where the kernel knows none."""
    return wanted_us if turn_us(0) else 0


@pytest.mark.parametrize("wanted_us", [100, 700])
def test_all_threads_of_a_server_have_short_turns_and_its_helpers_the_usual(
    start_server: StartServer, wanted_us: int
) -> None:
    server = start_server("--processor-turn-us", str(wanted_us))
    call = Caller(server)
    assert call("PUT", "s", b"text", headers={"Content-Type": "text/plain"}).status == 201
    assert call("POST", "/v1/server/_seal").body == {"sealed": True}
    assert {turn_us(task) for task in tasks(server.pid)} == {supported(wanted_us)}
    sealer = eventually(lambda: helpers(server), bool)
    # It steps back when it has begun, which may be a moment after it is there.
    eventually(lambda: {turn_us(pid) for pid in sealer}, lambda found: found == {turn_us(0)})


def test_a_server_may_be_told_to_leave_it_to_the_system(start_server: StartServer) -> None:
    server = start_server("--processor-turn-us", "0")
    assert {turn_us(task) for task in tasks(server.pid)} == {turn_us(0)}


def test_another_policy_is_left_alone() -> None:
    """In a process of its own, which may only go down."""
    child = os.fork()
    if child == 0:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        process.set_time_slice(100)
        os._exit(0 if os.sched_getscheduler(0) == os.SCHED_BATCH and turn_us(0) != 100 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
