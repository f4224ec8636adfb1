"""What tests of the pipeline's routes, and of edges, share. Each module has its own `server`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.calls import Caller
from support.edge import EdgeProcess, StartEdge
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


@pytest.fixture
def start_edge(tmp_path: Path) -> Iterator[StartEdge]:
    """Start edges with settings of their own: ``start_edge(url, mode="any", edge_hold_ms="500")``."""
    edges: list[EdgeProcess] = []

    def start(*upstreams: str, mode: str = "", **env: str) -> EdgeProcess:
        args = ["--upstream-mode", mode] if mode else []
        settings = {f"TAILRACE_{name.upper()}": value for name, value in env.items()}
        edges.append(EdgeProcess(tmp_path / f"edge-{len(edges)}", *upstreams, args=args, env=settings))
        edges[-1].start()
        return edges[-1]

    yield start
    for edge in edges:
        edge.kill()
