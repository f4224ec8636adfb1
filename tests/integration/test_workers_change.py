"""Another number of workers: every stream is what it was, wherever it lives, also if that is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.sealing import SEALING_ENV
from support.server import ServerProcess
from tailrace import failpoints
from tailrace.workers.layout import read_layout

STEPS = [name for name in failpoints.NAMES if name.startswith("workers.")]
JSON = {"Content-Type": "application/json"}
PLAIN = [f"plain/{number}" for number in range(12)]
PRODUCER = {**JSON, "Producer-Id": "p", "Producer-Epoch": "3"}


def start(directory: Path, workers: int, **env: str) -> ServerProcess:
    return ServerProcess(directory / "data", args=("--workers", str(workers)), env=env).start()


def fill(call: Caller) -> None:
    """Streams of all kinds: plain, closed, with a lifetime, producers or a schema, forked, deleted."""
    for number, name in enumerate(PLAIN):
        assert call("PUT", name, list(range(number + 1))).status == 201
    assert call("PUT", "closed", [1], headers={**JSON, "Stream-Closed": "true"}).status == 201
    assert call("PUT", "lasting", [1], headers={**JSON, "Stream-TTL": "86400"}).status == 201
    call("PUT", "produced", headers=JSON)
    for seq in range(3):
        assert call("POST", "produced", seq, headers={**PRODUCER, "Producer-Seq": str(seq)}).status in (
            200,
            204,
        )
    call("PUT", "strict", headers=JSON)
    assert call("POST", "strict/_schema", {"schema": {"type": "object", "required": ["id"]}}).status == 200
    for source, fork in (
        ("plain/3", "fork/a"),
        ("plain/4", "fork/b"),
        ("fork/a", "fork/c"),
        ("fork/b", "fork/d"),
    ):
        made = call("PUT", fork, headers={"Stream-Forked-From": f"/v1/stream/{source}"})
        assert made.status == 201, made
        assert call("POST", fork, fork).status == 204
    call("PUT", "dead", [1])
    assert call("DELETE", "dead").status == 204
    assert call("DELETE", "plain/4").status == 204
    config = {"type": "pull-wake", "pattern": "plain/*", "wake_stream": "wake"}
    call("PUT", "wake", headers=JSON)
    assert call("PUT", "__ds/subscriptions/s", config).status == 201


def picture(call: Caller) -> dict[str, Any]:
    """All that a client can see."""
    names = [one["name"] for one in call("GET", "/v1/streams").body]
    seen: dict[str, Any] = {"names": names}
    for name in names:
        head = call("HEAD", name)
        kept = ("stream-next-offset", "stream-closed", "content-type", "stream-earliest-offset")
        seen[name] = [call("GET", f"{name}?offset=-1").body, *(head.headers.get(key) for key in kept)]
    seen["dead"] = [call(method, "dead").status for method in ("GET", "DELETE")]
    seen["soft"] = call("GET", "plain/4").status
    seen["schema"] = call("GET", "strict/_schema").body
    links = call("GET", "__ds/subscriptions/s").body["streams"]
    seen["links"] = sorted((one["path"], one["acked_offset"]) for one in links)
    return seen


def check_goes_on(call: Caller, seq: int) -> None:
    """What was true of producers, schemas and forks holds on."""
    again = call("POST", "produced", seq - 1, headers={**PRODUCER, "Producer-Seq": str(seq - 1)})
    assert again.status == 204, again
    assert call("POST", "produced", 9, headers={**PRODUCER, "Producer-Seq": "99"}).code == "producer_gap"
    assert call("POST", "produced", seq, headers={**PRODUCER, "Producer-Seq": str(seq)}).status in (200, 204)
    assert call("POST", "strict", {}).status == 400
    assert call("POST", "closed", 2).code == "stream_closed"


@pytest.mark.parametrize("sealed", [False, True], ids=["hot", "sealed"])
def test_streams_move_with_everything_they_have(tmp_path: Path, sealed: bool) -> None:
    env = SEALING_ENV if sealed else {}
    server = start(tmp_path, 1, **env)
    fill(Caller(server))
    if sealed:
        assert Caller(server)("POST", "/v1/server/_seal").body == {"sealed": True}
    for seq, workers in enumerate((2, 3, 1, 1), 3):
        before = picture(Caller(server))
        server.stop()
        server = start(tmp_path, workers, **env)
        call = Caller(server)
        eventually(lambda call=call: picture(call), lambda seen, before=before: seen == before)
        check_goes_on(call, seq)
        assert read_layout(tmp_path / "data").workers == workers
    server.stop()


@pytest.mark.parametrize("step", STEPS)
def test_a_change_that_is_killed_is_done_again(tmp_path: Path, step: str) -> None:
    server = start(tmp_path, 2)
    fill(Caller(server))
    before = picture(Caller(server))
    server.stop()
    dying = ServerProcess(tmp_path / "data", args=("--workers", "3"), env={"TAILRACE_FAILPOINT": step})
    dying.start(ready=False)
    assert dying.wait_exit() == failpoints.EXIT_CODE
    server = start(tmp_path, 3)
    assert picture(Caller(server)) == before
    server.stop()
    assert [path.name for path in (tmp_path / "data" / "workers").iterdir()] == ["2"]


def test_what_a_worker_has_yet_to_tell_is_not_given_up(tmp_path: Path) -> None:
    """Killed all at once, a worker may not have delivered its news: then the number stays."""
    server = start(tmp_path, 2)
    call = Caller(server)
    for number in range(200):
        call("PUT", f"many/{number}")
    server.kill()
    server = ServerProcess(tmp_path / "data", args=("--workers", "1")).start(ready=False)
    if server.running:
        # Either it had, and the change is made, or the message says what to do.
        eventually(lambda: "ready" in server.log or not server.running, bool)
    assert "tailrace ready" in server.log or "start with --workers 2" in server.log
    server.kill()
    server = start(tmp_path, read_layout(tmp_path / "data").workers)
    names = [one["name"] for one in Caller(server)("GET", "/v1/streams?prefix=many/&limit=1000").body]
    assert len(names) == 200
    server.stop()
