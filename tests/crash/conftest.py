"""A disk that fails on command, and servers that run on it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from crash import world as world_shim
from crash import writeback as page_cache
from crash.faults import Disk, build
from crash.world import World


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def disk(faulty_library: Path, tmp_path: Path) -> Disk:
    """Give `disk.env` to a server, then tell the disk what to do."""
    return Disk(faulty_library, tmp_path / "faults")


@pytest.fixture(scope="session")
def writeback_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_cache.build(tmp_path_factory.mktemp("writeback"))


@pytest.fixture
def writeback(
    faulty_library: Path, writeback_library: Path, tmp_path: Path, seed: int
) -> page_cache.WritebackDisk:
    """A disk with a page cache that a power cut takes away."""
    return page_cache.WritebackDisk(faulty_library, writeback_library, tmp_path, seed)


@pytest.fixture(scope="session")
def world_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world_shim.build(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(world_library: Path, tmp_path: Path) -> World:
    """Give `world.env` to a server in `tmp_path / "data"`, then limit its disk or set its clock."""
    return World(world_library, tmp_path / "world", tmp_path / "data")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another one with each run; a failure shows how to run the test with the same one again."""
    found = int(os.environ.get("CRASH_SEED") or secrets.randbelow(2**32))
    print(f"to run it again: CRASH_SEED={found} pytest '{request.node.nodeid}'")
    return found
