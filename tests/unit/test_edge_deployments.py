"""Which server an upstream may be."""

from __future__ import annotations

from tailrace.edge.deployments import DIFFERENT, THE_SAME, Deployments


def judged(mode: str, *said: tuple[str, str]) -> tuple[list[str], int]:
    """What is said to each in turn, and how often everything that was kept had to go."""
    changes: list[None] = []
    deployments = Deployments(mode)
    deployments.on_change = lambda: changes.append(None)
    return [deployments.judge(upstream, name) for upstream, name in said], len(changes)


def test_one_upstream_may_be_any_server() -> None:
    assert judged("single", ("a", "x"), ("a", "x"), ("a", "y"), ("a", "x")) == (["", "", "", ""], 2)


def test_doors_lead_to_one_server() -> None:
    assert judged("any", ("a", "x"), ("b", "x"), ("b", "y"), ("b", "x")) == (["", "", DIFFERENT, ""], 0)


def test_the_server_behind_all_doors_may_begin_again() -> None:
    said = ("a", "x"), ("b", "x"), ("a", "y"), ("b", "y"), ("a", "y")
    assert judged("any", *said) == (["", "", DIFFERENT, "", ""], 2)


def test_shards_are_servers_of_their_own() -> None:
    said = ("a", "x"), ("b", "y"), ("b", "x"), ("b", "z")
    assert judged("sharded", *said) == (["", "", THE_SAME, ""], 1)
