"""Which server an upstream may be."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.edge.upstream_pool import parse_upstreams
from tailrace.edge.upstreams import DIFFERENT_SERVERS, SAME_SERVER, DeploymentCheck, Upstream, Upstreams


def judged(mode: str, *said: tuple[str, str]) -> tuple[list[str], int]:
    """What is said to each in turn, and how often everything that was kept had to go."""
    changes: list[None] = []
    deployments = DeploymentCheck(mode, lambda: changes.append(None))
    return [deployments.judge(upstream, name) for upstream, name in said], len(changes)


def test_one_upstream_may_be_any_server() -> None:
    assert judged("single", ("a", "x"), ("a", "x"), ("a", "y"), ("a", "x")) == (["", "", "", ""], 2)


def test_doors_lead_to_one_server() -> None:
    assert judged("any", ("a", "x"), ("b", "x"), ("b", "y"), ("b", "x")) == (
        ["", "", DIFFERENT_SERVERS, ""],
        0,
    )


def test_the_server_behind_all_doors_may_begin_again() -> None:
    said = ("a", "x"), ("b", "x"), ("a", "y"), ("b", "y"), ("a", "y")
    assert judged("any", *said) == (["", "", DIFFERENT_SERVERS, "", ""], 2)


def test_shards_are_servers_of_their_own() -> None:
    said = ("a", "x"), ("b", "y"), ("b", "x"), ("b", "z")
    assert judged("sharded", *said) == (["", "", SAME_SERVER, ""], 1)


def test_a_stream_goes_to_a_door_that_is_known_to_be_the_right_one() -> None:
    """One that has never answered may be anybody, and one whose connections failed may be another by now."""

    async def run() -> None:
        upstreams = Upstreams(
            parse_upstreams("a=http://127.0.0.1:1,b=http://127.0.0.1:2"), "any", Limits(), b"edge"
        )
        a, b = upstreams.all

        def chosen() -> set[Upstream]:
            return {upstreams.for_stream(f"stream/{number}") for number in range(50)}

        assert chosen() == {a, b}, "nobody has answered yet"
        a.reached, a.healthy = True, False
        assert chosen() == {a}
        a.healthy = b.reached = True
        assert chosen() == {a, b}
        a.record_failed(0.0)
        assert chosen() == {b}
        b.wrong = "another server"
        assert chosen() == {a}
        a.wrong = "another server"
        with pytest.raises(TailraceError):
            chosen()
        await upstreams.stop()

    asyncio.run(run())
