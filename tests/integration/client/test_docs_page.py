"""The client's page and the examples, executed as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from support.server import ServerProcess
from tailrace.client import Client

ROOT = Path(__file__).resolve().parents[3]
WAIT_S_MAX = 60.0
PRINTED_URL = "http://127.0.0.1:4437"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block that ends its process on purpose must not end the page.
_RUNNER = """
import sys
names = {"__name__": "page"}
for block in sys.stdin.read().split("\\0"):
    try:
        exec(compile(block, "docs/client.md", "exec"), names)
    except SystemExit:
        pass
"""


def _print_of(server: ServerProcess, blocks: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _RUNNER],
        input="\0".join(blocks).replace(PRINTED_URL, server.base_url),
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S_MAX,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_of_the_page_runs_and_prints_what_is_shown(
    start_server: Callable[..., ServerProcess],
) -> None:
    blocks = _BLOCK.findall((ROOT / "docs" / "client.md").read_text(encoding="utf-8"))
    code = [text for kind, text in blocks if kind == "python"]
    shown = [text for kind, text in blocks if kind == "text"]
    assert len(code) > 5
    assert _print_of(start_server(), code) == "".join(shown)


def test_follow_and_resume(server: ServerProcess, tmp_path: Path) -> None:
    script = ROOT / "examples" / "follow_and_resume.py"
    command = [sys.executable, str(script), server.base_url, "example", str(tmp_path / "offset")]
    with Client(server.base_url) as client:
        stream = client.stream("example", content_type="application/json")
        stream.create(body=["one"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            assert _lines(first.stdout, 1) == ["one\n"]
            stream.append("two")
            assert _lines(first.stdout, 1) == ["two\n"]
            # What is stored is stored after the work: wait for it, then end the process without warning.
            _wait_for_offset(tmp_path / "offset", stream.head().next_offset)
            first.kill()
        stream.append("three", close=True)
    second = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S_MAX)
    assert second.stdout == "three\n"


def _lines(stream: IO[str] | None, count: int) -> list[str]:
    assert stream is not None
    return [stream.readline() for _ in range(count)]


def _wait_for_offset(file: Path, offset: str) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not file.exists() or file.read_text() != offset:
        assert time.monotonic() < deadline, "the position was not stored"
        time.sleep(0.01)
