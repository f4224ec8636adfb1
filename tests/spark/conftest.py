"""What the tests of the source and the sink share: streams with a known content, on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.sealing import SEALING_ENV, wait_sealed
from support.server import ServerProcess
from support.spark_rows import Filled, fill
from tailrace.spark.segment_objects import STORES
from tailrace.spark.server import SERVERS

StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def seamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """A server with the streams of `fill`: their first halves in many small segments, the rest in memory."""
    server = ServerProcess(tmp_path_factory.mktemp("seamed") / "data", env=SEALING_ENV).start()
    fill(server, range(60))
    wait_sealed(server.data_dir)
    server.stop()
    # Nothing is sealed any more, so what comes now stays where it is.
    server.env = {}
    server.start()
    filled = fill(server, range(60, 120))
    yield filled
    server.stop()


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    """What a process of Spark keeps until it ends, a test that plays one lets go of."""
    yield
    SERVERS.close()
    STORES.close()
