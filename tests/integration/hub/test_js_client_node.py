"""The TypeScript client of the hub, in Node, against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from conftest import StartServer
from support.hub_js import NODE_ENV, ROOT, built
from support.server import ServerProcess

WS = ROOT / "tests" / "conformance" / "node_modules" / "ws"
# As in Node 20 and before, whatever Node this is.
WITHOUT_WEBSOCKET = "delete globalThis.WebSocket\n"
CONNECT = """
import { Hub } from "./dist/index.js"

const hubs = [1, 2].map((number) => new Hub(process.env.TAILRACE_TEST_URL, {
  address: `@(js/hub-${number})`, reconnect: { first: 10, max: 100 } }))
try {
  await hubs[0].connect()
  const begun = performance.now()
  await hubs[1].connect()
  console.log(performance.now() - begun >= 1000 ? "connected later" : "connected")
  for (const hub of hubs) await hub.close()
} catch (error) {
  console.log(`${error.code}: ${error.message}`)
}
"""


def node(directory: Path, server: ServerProcess, *args: str, **env: str) -> str:
    done = subprocess.run(
        ["node", *args],
        cwd=directory,
        env={**os.environ, "NO_COLOR": "1", **env, "TAILRACE_TEST_URL": server.base_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(directory: Path, *, with_ws: bool) -> Path:
    """The client as a package manager puts it into a project, with or without the package `ws`."""
    client = built()
    shutil.copytree(client / "dist", directory / "dist")
    for name in ("package.json", "hub.test.mjs"):
        shutil.copy(client / name, directory / name)
    (directory / "without.mjs").write_text(WITHOUT_WEBSOCKET, encoding="utf-8")
    (directory / "connect.mjs").write_text(CONNECT, encoding="utf-8")
    if with_ws:
        (directory / "node_modules").mkdir()
        (directory / "node_modules" / "ws").symlink_to(WS)
    return directory


def test_the_client_in_node(server: ServerProcess) -> None:
    assert "pass 14" in node(built(), server, "--test", "hub.test.mjs", **NODE_ENV)


def test_the_client_in_node_20_uses_the_package_ws(server: ServerProcess, tmp_path: Path) -> None:
    project = installed(tmp_path, with_ws=True)
    assert "pass 14" in node(project, server, "--import", "./without.mjs", "--test", "hub.test.mjs")


def test_without_any_websocket_the_client_says_what_it_needs(server: ServerProcess, tmp_path: Path) -> None:
    project = installed(tmp_path, with_ws=False)
    said = node(project, server, "--import", "./without.mjs", "connect.mjs")
    assert said.startswith("no_websocket: "), said
    assert "Node 22" in said
    assert "ws" in said


def test_the_client_waits_for_retry_after_and_connects(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(env={"TAILRACE_HUB_CONNECTS_PER_S": "1"})
    assert node(installed(tmp_path, with_ws=True), server, "connect.mjs") == "connected later\n"
