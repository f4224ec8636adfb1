"""What a server or an edge writes is for its own user only, whatever umask and directory it is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.edge import EdgeProcess, cached
from support.sealing import SEALING_ENV
from support.server import ServerProcess

JSON = {"Content-Type": "application/json"}
OTHERS = 0o077
PUBLIC = ("VERSION", "deployment", "workers.json")  # /readyz tells the same


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def _readable_by_others(directory: Path) -> dict[str, str]:
    """What lies below a directory and can be opened by others, if they can open the directory."""
    found: dict[str, str] = {}
    for path in directory.iterdir():
        mode = path.lstat().st_mode
        if mode & OTHERS and path.name not in PUBLIC:
            found[str(path)] = oct(mode)
        if path.is_dir() and mode & OTHERS:
            found |= _readable_by_others(path)
    return found


def _loosened(directory: Path) -> None:
    """As an older version made it."""
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif (
            path.name.startswith("watch.db") or path.parent.name in ("cache", "spool") or len(path.name) == 64
        ):
            path.chmod(0o644)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_in_a_directory_that_others_can_open(
    start_server: StartServer, tmp_path: Path, workers: str
) -> None:
    directory = tmp_path / "data"
    directory.mkdir(mode=0o755)
    server = start_server("--workers", workers, data_dir=directory, env=SEALING_ENV)
    _fill(server)
    assert _readable_by_others(directory) == {}
    server.stop()
    _loosened(directory)
    server.start()
    _fill(server)
    # Objects have closed files in directories that were made open.
    assert [path for path in _readable_by_others(directory) if "/objects" not in path] == []
    assert not [
        path for path in (directory / "objects").rglob("*") if path.is_file() and path.stat().st_mode & OTHERS
    ]


def _fill(server: ServerProcess) -> None:
    """With something in every place that a server has: journal, segments, their cache, documents."""
    call = Caller(server)
    name = "sealed/one"
    assert call("PUT", name, headers=JSON).status in (200, 201)
    assert call("POST", name, [1, 2, 3, 4, 5, 6]).status in (200, 204)
    eventually(
        lambda: call("GET", "/v1/streams?prefix=sealed/").body[0],
        lambda row: int(row["uploaded_through"]) > 0,
    )
    assert call("GET", name).status == 200
    assert call("PUT", "/v1/databases/default/docs/things/one", {"n": 1}).status in (200, 201)


def _edge(tmp_path: Path, server: ServerProcess, cache: Path) -> EdgeProcess:
    env = {"TAILRACE_EDGE_MEMORY_CACHE_BYTES": "0"}
    return EdgeProcess(tmp_path / "edge", server.base_url, args=["--cache-dir", str(cache)], env=env)


@pytest.mark.parametrize("made", ["by the edge", "before, and empty"])
def test_the_cache_of_an_edge(server: ServerProcess, tmp_path: Path, made: str) -> None:
    cache = tmp_path / "above" / "slices"
    if made == "before, and empty":
        cache.mkdir(parents=True, mode=0o755)
    edge = _edge(tmp_path, server, cache)
    edge.start()
    call = Caller(edge)
    name = f"cached/{made.replace(' ', '').replace(',', '')}"
    assert call("PUT", name, [1, 2], headers={**JSON, "Stream-Closed": "true"}).status == 201
    assert cached(call, name).body == [1, 2]
    eventually(lambda: [path for path in cache.rglob("*") if len(path.name) == 64], bool)
    assert cache.stat().st_mode & OTHERS == 0
    assert _readable_by_others(cache) == {}
    edge.stop()
    _loosened(cache)
    edge.start()
    assert cache.stat().st_mode & OTHERS == 0
    assert _readable_by_others(cache) == {}, "what an older version left is closed"
    assert cached(call, name).body == [1, 2]
    edge.stop()


def test_a_cache_directory_with_files_of_others_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    """An edge must not take away from others what they can read: `--cache-dir /tmp` is a mistake."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "notes.txt").write_text("of another program")
    edge = _edge(tmp_path, server, shared)
    edge.start(ready=False)
    assert edge.wait_exit() == 1
    assert "is open to other users and has files of other programs" in edge.log
    assert shared.stat().st_mode & 0o777 == 0o755
    (shared / "notes.txt").unlink()
    edge.start()
    edge.stop()
