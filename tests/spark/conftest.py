"""What the tests of the source and the sink share: streams with a known content, on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.s3 import S3Server
from support.server import ServerProcess
from support.spark_rows import Filled, seamed_server
from tailrace.spark.object_stores import SEGMENT_STORES
from tailrace.spark.server_client import CLIENTS

StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def seamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """A server with the streams of `fill`: their first halves in many small segments, the rest in memory."""
    with seamed_server(tmp_path_factory.mktemp("seamed"), {}) as filled:
        yield filled


@pytest.fixture
def seamed_bucket(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Iterator[Filled]:
    """The same with a bucket as the store."""
    directory = tmp_path_factory.mktemp("seamed")
    store = {"TAILRACE_OBJECT_STORE": s3.url(f"seamed/{directory.name}"), **s3.env()}
    with seamed_server(directory, store) as filled:
        yield filled


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    """What a process of Spark keeps until it ends, a test that plays one lets go of."""
    yield
    CLIENTS.close()
    SEGMENT_STORES.close()
