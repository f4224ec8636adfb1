"""The JavaScript client of the hub, in Node, against a real server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.server import ServerProcess

# Node has a WebSocket of its own since version 22; in 20 it has to be asked for.
NODE_ENV = {"NODE_OPTIONS": "--experimental-websocket --no-warnings", "NO_COLOR": "1"}
CLIENT = Path(__file__).resolve().parents[2] / "clients" / "hub-js"


def test_the_javascript_client(server: ServerProcess) -> None:
    done = subprocess.run(
        ["node", "--test", "hub.test.mjs"],
        cwd=CLIENT,
        env={**os.environ, **NODE_ENV, "TAILRACE_TEST_URL": server.base_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 10" in done.stdout, done.stdout
