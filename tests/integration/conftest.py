"""What tests of the pipeline's routes share. Each module has its own `server`."""

from __future__ import annotations

import pytest

from support.calls import Caller
from support.offers import FakePipeline
from support.server import ServerProcess


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def pipeline(server: ServerProcess, call: Caller) -> FakePipeline:
    return FakePipeline(call, server.data_dir)


@pytest.fixture
def ev(request: pytest.FixtureRequest) -> str:
    """A stream of its own for each test."""
    return f"ev/{request.node.name}"
