"""The client of the hub for browsers and Node, built from its sources as they are now."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "hub-js"
# Node has a WebSocket of its own since version 22; in 20 it has to be asked for.
NODE_ENV = {"NODE_OPTIONS": "--experimental-websocket --no-warnings", "NO_COLOR": "1"}


def built() -> Path:
    """Where it is. Nothing is done if it is up to date, and one does it if several ask at once."""
    directory = os.open(CLIENT, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            ["make", "--silent", "clients/hub-js/dist/.built"],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return CLIENT
