"""The TypeScript client of the hub in Chromium, and a program that is compiled against its declarations."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.browser import browser, pages
from support.hub_js import built
from support.server import ServerProcess


def test_the_client_in_chromium(server: ServerProcess, tmp_path: Path) -> None:
    built()
    with pages() as (base, results):
        url = f"{base}/clients/hub-js/browser.test.html?server={server.base_url}"
        with browser(url, tmp_path / "profile"):
            result = results.get(timeout=100)
    assert result == {
        "price": 14,
        "status": "accepted",
        "kept": "ü€😀",
        "lag": 0,
        "refused": "unknown_actor",
        "topic": "browsers/all",
        "found": ["@(browser/one)", "@(browser/other)"],
        "subscribed": "browsers/+",
    }


def test_the_declarations_compile() -> None:
    client = built()
    options = ["--noEmit", "--strict", "--target", "es2022", "--module", "nodenext", "--lib", "es2023,dom"]
    command = ["node_modules/.bin/tsc", *options, "types.test.ts"]
    done = subprocess.run(command, cwd=client, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
