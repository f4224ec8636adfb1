"""The fixtures of client tests: the same test drives the synchronous and the asynchronous client."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support.async_bridge import Bridge, Loop
from tailrace.client import AsyncClient, Client, Retries

# Tests wait for a condition, never for a delay: short ones keep the retries quick.
QUICK = Retries(delay_s_first=0.01, delay_s_max=0.1, attempts_max=50)

OpenClient = Callable[..., Any]
_numbers = itertools.count(1)


@pytest.fixture(params=["sync", "async"])
def open_client(request: pytest.FixtureRequest) -> Iterator[OpenClient]:
    """Open clients for a base URL; they are closed after the test."""
    with ExitStack() as stack:
        loop: Loop | None = None
        if request.param == "async":
            loop = Loop()
            stack.callback(loop.close)

        def start(base_url: str, **options: Any) -> Any:
            options.setdefault("retries", QUICK)
            if loop is None:
                return stack.enter_context(Client(base_url, **options))
            client = loop.call(AsyncClient, base_url, **options)
            return stack.enter_context(Bridge(loop, client))

        yield start


@pytest.fixture
def name() -> str:
    """A stream name that no other test uses."""
    return f"client/{next(_numbers)}"
