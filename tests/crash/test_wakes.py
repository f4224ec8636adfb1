"""A pull-wake and its event are two records of the journal. Killed around either, the event stands once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from crash.faults import SYNC, WRITE, Disk
from crash.station import eventually
from crash.wire import JSON, LostError, Wire
from support.server import ServerProcess

# The file that appends go to; the next one is being prepared meanwhile.
ACTIVE = "0000000000000001.jnl"
CONFIG = {"type": "pull-wake", "pattern": "jobs/*", "wake_stream": "wake"}


@pytest.fixture
def server(tmp_path: Path, disk: Disk) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "data", env=disk.env).start()
    with_wire(process, "PUT", "/v1/stream/wake")
    with_wire(process, "PUT", "/v1/stream/jobs/a")
    with_wire(process, "PUT", "/v1/stream/__ds/subscriptions/s", CONFIG)
    yield process
    process.kill()
    print(process.log)


def with_wire(server: ServerProcess, method: str, path: str, body: Any = None) -> Any:
    """One request on a connection of its own; the JSON that came, if any."""
    wire = Wire(server.port)
    try:
        answer = wire.send_path(method, path, b"" if body is None else orjson.dumps(body), JSON)
        assert answer.ok, answer
        return orjson.loads(answer.body) if answer.body else None
    finally:
        wire.close()


def events(server: ServerProcess) -> list[int]:
    """The generations in the wake stream."""
    return [event["generation"] for event in with_wire(server, "GET", "/v1/stream/wake?offset=-1")]


def restart_dead(server: ServerProcess, disk: Disk) -> None:
    server.kill()
    disk.heal()
    server.start()
    # Behind whatever the server had to write when it started.
    with_wire(server, "PUT", "/v1/stream/behind")


# An append, the wake it causes and the wake's event are three batches, each one write and one sync.
@pytest.mark.parametrize("operation", [WRITE, SYNC], ids=["write", "sync"])
@pytest.mark.parametrize("batch", [0, 1, 2], ids=["append", "wake", "event"])
def test_killed_around_a_wake_its_event_is_written_once(
    server: ServerProcess, disk: Disk, operation: int, batch: int
) -> None:
    death = disk.die(ACTIVE, operation, skip=batch)
    try:
        with_wire(server, "POST", "/v1/stream/jobs/a", [1])
    except LostError:
        assert batch == 0
    eventually(lambda: disk.hits(death) == 1, "the server is killed")
    restart_dead(server, disk)
    if (batch, operation) == (0, WRITE):
        with_wire(server, "POST", "/v1/stream/jobs/a", [1])  # it never was
    eventually(lambda: events(server), "the event is there")
    restart_dead(server, disk)
    assert events(server) == [1]
    claimed = with_wire(server, "POST", "/v1/stream/__ds/subscriptions/s/claim", {"worker": "w"})
    assert claimed["generation"] == 1


def test_an_event_whose_commit_failed_is_written_when_the_journal_is_well_again(
    server: ServerProcess, disk: Disk
) -> None:
    failure = disk.fail(ACTIVE, SYNC, skip=2, count=1)
    with_wire(server, "POST", "/v1/stream/jobs/a", [1])
    eventually(lambda: disk.hits(failure) == 1, "the event's sync fails")
    eventually(lambda: events(server) == [1], "the event is written again")
    restart_dead(server, disk)
    assert events(server) == [1]
