"""A disk that fails on command, and servers that run on it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from crash import writeback as page_cache
from crash.faults import Disk, build


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
def writeback(faulty_library: Path, writeback_library: Path, tmp_path: Path) -> page_cache.WritebackDisk:
    """A disk with a page cache, with another seed each time; WRITEBACK_SEED repeats one."""
    seed = int(os.environ.get("WRITEBACK_SEED") or random.SystemRandom().getrandbits(32))
    return page_cache.WritebackDisk(faulty_library, writeback_library, tmp_path, seed)
