"""Times in hub requests: a time without a zone would mean another moment on each server."""

from __future__ import annotations

import pytest

from support.hub_world import World
from tailrace.hub.requests import parse_time_ns

A = "@(t/a)"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1_700_000_000_000, 1_700_000_000_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000_000),
        ("2023-11-14T23:13:20.5+01:00", 1_700_000_000_500_000_000),
        ("2023-11-14T22:13:20", None),
        ("2023-11-14", None),
        (True, None),
        (None, None),
    ],
)
def test_forms_of_a_time(value: object, expected: int | None) -> None:
    assert parse_time_ns(value) == expected


def test_a_registry_as_of_a_time_without_a_zone_is_refused() -> None:
    world = World()
    actor = world.actor(A)
    refused = world.ask(actor, "hub:discover", {"pattern": "*", "asOf": "2023-11-14T22:13:20"})
    assert "time zone" in refused["payload"]["message"]
