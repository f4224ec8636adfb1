"""The server is killed at each step of a compaction: it finishes by itself, or nothing has happened."""

from __future__ import annotations

import contextlib
import http.client
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.offers import FakePipeline, events, head_of, plan, seal
from support.server import ServerProcess
from tailrace.common import failpoints

SETTINGS = {
    "TAILRACE_COMPACT_SEGMENTS": "3",
    "TAILRACE_COMPACT_AGE_MS": "0",
    "TAILRACE_SEAL_INTERVAL_MS": "100",
    "TAILRACE_PIPELINE": "off",
}
TEXT = {"Content-Type": "text/plain"}
STEPS = [name for name in failpoints.NAMES if name.startswith("compact.")]
BEFORE = {"compact.after_intent", "compact.before_manifest"}


def begin(call: Caller) -> bytes:
    assert call("PUT", "ev", headers=TEXT).status == 201
    for number in range(3):
        assert call("POST", "ev", f"line {number}\n".encode(), headers=TEXT).status == 204
        seal(call, "ev")
    return call("GET", "ev?offset=-1").raw


@pytest.mark.parametrize(
    "failpoint",
    [
        name if name == "compact.after_manifest" else pytest.param(name, marks=pytest.mark.nightly)
        for name in STEPS
    ],
)
def test_killed_on_the_way(tmp_path: Path, failpoint: str) -> None:
    server = ServerProcess(tmp_path / "data", env={**SETTINGS, "TAILRACE_FAILPOINT": failpoint})
    server.start()
    call = Caller(server)
    pipeline = FakePipeline(call, server.data_dir)
    content = begin(call)
    shown = eventually(lambda: plan(call, "ev"), lambda found: found["work"])
    body = pipeline.join(shown, shown["work"][0], "one")
    with contextlib.suppress(OSError, http.client.HTTPException):
        pipeline.publish(body)
    server.wait_exit()
    entries = [(info[2], info[3]) for info in head_of(pipeline, shown)["segments"]]
    assert entries == ([(n, n) for n in range(1, 4)] if failpoint in BEFORE else [(1, 3)])
    if failpoint not in BEFORE:
        # The day of grace is over before the server comes back.
        for one in shown["work"][0]["segments"]:
            (pipeline.objects / one["object"]).unlink()
    server.env = SETTINGS
    server.start()
    # What was begun is finished without any pipeline.
    eventually(lambda: plan(call, "ev")["work"], lambda work: not work)
    eventually(lambda: head_of(pipeline, shown)["segments"], lambda found: len(found) == 1)
    eventually(lambda: call("GET", "ev?offset=-1"), lambda reply: reply.raw == content)
    assert pipeline.publish(body).body["result"] == "already_published"
    server.restart(kill=True)
    assert call("GET", "ev?offset=-1").raw == content
    told = [one for one in events(call, shown["stream_id"]) if one["type"] == "segment"]
    assert [one["headers"]["operation"] for one in told] == ["insert"] * 3 + ["delete"] * 3 + ["insert"]
    server.stop()


@pytest.mark.nightly
def test_a_segment_that_was_lost_meanwhile_is_given_up(tmp_path: Path) -> None:
    """Nothing was listed yet, and the sweep took the new object while the server was down."""
    server = ServerProcess(
        tmp_path / "data", env={**SETTINGS, "TAILRACE_FAILPOINT": "compact.before_manifest"}
    )
    server.start()
    call = Caller(server)
    pipeline = FakePipeline(call, server.data_dir)
    content = begin(call)
    shown = eventually(lambda: plan(call, "ev"), lambda found: found["work"])
    body = pipeline.join(shown, shown["work"][0], "one")
    with contextlib.suppress(OSError, http.client.HTTPException):
        pipeline.publish(body)
    server.wait_exit()
    (pipeline.objects / body["add"][0]["object"]).unlink()
    server.env = SETTINGS
    server.start()
    again = eventually(lambda: plan(call, "ev"), lambda found: found["work"])
    assert pipeline.publish(body).code == "object_missing"
    assert call("GET", "ev?offset=-1").raw == content
    assert pipeline.publish(pipeline.join(again, again["work"][0], "two")).body["result"] == "published"
    assert call("GET", "ev?offset=-1").raw == content
    server.stop()
