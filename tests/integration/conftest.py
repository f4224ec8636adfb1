"""What tests of the pipeline's routes share. Each module has its own `server`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.calls import Caller
from support.offers import FakePipeline
from support.server import ServerProcess

# As in the file above this one: whoever reads the types of a test here finds this file first.
StartServer = Callable[..., ServerProcess]


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
