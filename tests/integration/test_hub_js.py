"""The TypeScript client of the hub, in Node, against a real server."""

from __future__ import annotations

import os
import subprocess

from support.hub_js import NODE_ENV, built
from support.server import ServerProcess


def test_the_client_in_node(server: ServerProcess) -> None:
    done = subprocess.run(
        ["node", "--test", "hub.test.mjs"],
        cwd=built(),
        env={**os.environ, **NODE_ENV, "TAILRACE_TEST_URL": server.base_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 11" in done.stdout, done.stdout
