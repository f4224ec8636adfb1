"""What is not known of a source is null, never zero."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.cli import source
from tailrace.cli.session import Session
from tailrace.common.clock import SystemClock
from tailrace.watch.sources.model import SourceStatus

UNKNOWN = ("lagBytes", "lagChanges", "lagSeconds", "loaded", "retainedBytes", "walStatus", "lastChangeAt")


def test_a_source_that_was_not_reached_yet_knows_no_lag() -> None:
    shown = SourceStatus(clock=SystemClock()).to_json()
    assert {name: shown[name] for name in UNKNOWN} == dict.fromkeys(UNKNOWN)


def test_a_source_that_has_read_everything_has_no_lag() -> None:
    status = SourceStatus(clock=SystemClock(), connected=True)
    assert (status.to_json()["lagChanges"], status.to_json()["lagSeconds"]) == (None, None)
    status.set_caught_up(all_read=True)
    assert (status.to_json()["lagChanges"], status.to_json()["lagSeconds"]) == (0, 0.0)
    status.connected = False
    assert (status.to_json()["lagChanges"], status.to_json()["lagSeconds"]) == (None, None), (
        "it may have more by now"
    )


def test_the_command_line_says_what_is_not_known(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    status: dict[str, Any] = {
        **SourceStatus(clock=SystemClock()).to_json(),
        "phase": "new",
        "reason": None,
        "token": "-",
        "changes": 0,
    }
    shown = {"database": "default", "name": "pg1", "kind": "postgres", "slot": "s", "collections": {}}
    source._print({**shown, "status": status}, Session())
    out = capfdbinary.readouterr().out.decode()
    assert "lag          not known\n" in out
    assert "retains an unknown number of bytes" in out
    assert "changes      0 since the server started" in out
    assert "0 bytes" not in out
