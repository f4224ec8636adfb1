"""Actors for tests of the hub: the same test drives the synchronous and the asynchronous client."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support.async_bridge import Bridge, Loop
from tailrace.client import Retries
from tailrace.client.hub import AsyncHub, Hub

# Tests wait for a condition, never for a delay: short ones keep the retries quick.
QUICK = Retries(delay_s_first=0.01, delay_s_max=0.1, attempts_max=3)
WAIT_S = 30.0

OpenHub = Callable[..., Any]
_numbers = itertools.count(1)


def fresh_address(kind: str = "t") -> str:
    """An address that no other test uses."""
    return f"@({kind}/{next(_numbers)})"


@pytest.fixture(params=["sync", "async"])
def open_hub(request: pytest.FixtureRequest) -> Iterator[OpenHub]:
    """Connected clients; they are closed after the test."""
    with ExitStack() as stack:
        loop: Loop | None = None
        if request.param == "async":
            loop = Loop()
            stack.callback(loop.close)

        def start(base_url: str, **options: Any) -> Any:
            options.setdefault("retries", QUICK)
            options.setdefault("address", fresh_address())
            if loop is None:
                return stack.enter_context(Hub(base_url, **options))
            return stack.enter_context(Bridge(loop, loop.call(AsyncHub, base_url, **options)))

        yield start


def next_of(hub: Any) -> Any:
    """The next message; a test that waits for it fails if there is none."""
    message = hub.next_message(WAIT_S)
    assert message is not None
    return message
