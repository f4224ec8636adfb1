"""A disk that fails on command, and servers that run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.faults import Disk, build


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def disk(faulty_library: Path, tmp_path: Path) -> Disk:
    """Give `disk.env` to a server, then tell the disk what to do."""
    return Disk(faulty_library, tmp_path / "faults")
