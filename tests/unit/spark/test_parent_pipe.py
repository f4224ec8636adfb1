"""The pipe from a server to its pipeline: orders and tokens come through it, and its end is the end."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

CHILD = """
import sys, threading, time
from tailrace.spark.jobs.pipeline import ParentPipe

pipe = ParentPipe(int(sys.argv[1]))
print(pipe.settings.endpoint, pipe.settings.master, pipe.token(), flush=True)
while pipe.token() == "one":
    time.sleep(0.01)
print(pipe.token(), flush=True)
threading.Event().wait()  # for ever: only the end of the pipe ends it
"""


def test_orders_tokens_and_the_end() -> None:
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(reading)], pass_fds=[reading], stdout=subprocess.PIPE, text=True
    )
    os.close(reading)
    assert child.stdout is not None
    orders = {"endpoint": "http://127.0.0.1:1", "token": "one", "unknown": 7}
    os.write(writing, msgspec.json.encode(orders) + b"\n")
    assert child.stdout.readline() == "http://127.0.0.1:1 None one\n"
    os.write(writing, b'{"token":"two"}\n')
    assert child.stdout.readline() == "two\n"
    os.close(writing)
    assert child.wait(60) == 0
    child.stdout.close()
