"""The example of three actors: the server dies in the middle of their conversation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.cli import tailrace
from support.hub_js import NODE_ENV, built
from support.server import ServerProcess

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "hub"
COUNT = 20
PAGE = """
import { converse } from "./page.js"
const quick = { count: %d, pauseMs: 50, reconnect: { first: 20, max: 200 } }
await converse(process.env.TAILRACE_ENDPOINT, (line) => console.log(line), quick)
"""


def test_the_conversation_goes_on_over_a_crash_of_the_server(tmp_path: Path) -> None:
    built()
    server = ServerProcess(tmp_path / "data").start()
    env = {**os.environ, **NODE_ENV, "TAILRACE_ENDPOINT": server.base_url}
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "worker.py"], cwd=EXAMPLE, env=env, stdout=pipe, text=True)
    page = None
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith("@(demo/worker)")
        script = ["node", "--input-type=module", "-e", PAGE % COUNT]
        page = subprocess.Popen(script, cwd=EXAMPLE, env=env, stdout=pipe, text=True)
        assert page.stdout is not None
        assert page.stdout.readline() == "1 squared is 1\n"
        server.kill()
        server.start()
        asked = tailrace("hub", "ask", "@(demo/worker)", "square", '{"n": 12}', env=env)
        assert (asked.code, asked.out.strip()) == (0, '{"square":144}')
        noted = tailrace("hub", "send", "@(demo/worker)", "note", '"lunch"', "--ack", "accepted", env=env)
        assert noted.code == 0
        printed, _ = page.communicate(timeout=100)
        assert printed.splitlines() == [f"{n} squared is {n * n}" for n in range(2, COUNT + 1)]
        assert page.returncode == 0
        seen = [worker.stdout.readline() for _ in range(2)]
        while not any("note lunch" in line for line in seen):
            seen.append(worker.stdout.readline())
    finally:
        for process in (worker, page):
            if process is not None:
                process.kill()
                process.communicate()
        server.stop()
