"""SIGKILL at every step of retention: what is gone stays gone, what forks show stays, nothing lies around."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import tailrace
from support.retention import (
    ENTRY_BYTES,
    TEXT,
    earliest,
    stored,
    text_of,
    texts,
    wait_deleted,
    wait_idle,
    wait_trimmed,
)
from support.sealing import SEALING_ENV, wait_until
from support.server import ServerProcess
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset

STEPS = (
    "retain.before_trim",
    "retain.after_trim",
    "retain.before_manifest",
    "gc.before_delete",
    "gc.after_delete",
)
COUNT_MAX = 400


class Life:
    """A server that dies once, at a failpoint, whatever it is doing then."""

    def __init__(self, data_dir: Path, failpoint: str) -> None:
        self.server = ServerProcess(data_dir, env={**SEALING_ENV, "TAILRACE_FAILPOINT": failpoint}).start()
        self.http = Wire(self.server.port)
        self.died = False

    def revive(self) -> None:
        assert not self.died, "it died twice"
        self.died = True
        self.http.close()
        self.server.wait_exit()
        del self.server.env["TAILRACE_FAILPOINT"]
        self.server.start()

    def call(self, method: str, path: str, headers: dict[str, str], body: str | None = None) -> int:
        while True:
            try:
                return self.http.call(method, path, {"Content-Type": TEXT, **headers}, body).status
            except (OSError, AssertionError):
                self.revive()

    def append(self, name: str, first: int, last: int) -> None:
        """Exactly once each, however often it is sent."""
        for entry in range(first, last + 1):
            producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(entry - 1)}
            assert self.call("POST", name, producer, text_of(entry)) in (200, 204)

    def trimmed(self, entry: int) -> bool:
        try:
            return earliest(self.http, "a") >= entry
        except (OSError, AssertionError):
            self.revive()
            return False


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def life(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[Life]:
    life = Life(data_dir, request.param)
    yield life
    life.http.close()
    life.server.kill()


@pytest.mark.parametrize("life", [f"{step}:{nth}" for step in STEPS for nth in (1, 3)], indirect=True)
def test_a_crash_while_retention_is_at_work(life: Life, data_dir: Path) -> None:
    bounds = {"Stream-Retention-Bytes": str(5 * ENTRY_BYTES)}
    assert life.call("PUT", "a", bounds) in (200, 201)
    life.append("a", 1, 4)
    fork = {
        "Stream-Forked-From": "a",
        "Stream-Fork-Offset": encode_offset(0, 3),
        "Stream-Retention-Bytes": "100000",
    }
    assert life.call("PUT", "f", fork) in (200, 201)
    # In several rounds, so that each step is reached more than once.
    count = 4
    while not life.died:
        assert count < COUNT_MAX, "the failpoint is never reached"
        life.append("a", count + 1, count + 10)
        count += 10
        if not life.died:
            wait_until(lambda last=count: life.died or life.trimmed(last - 7), "trimmed, or back to life")
    life.append("a", count + 1, count + 10)
    count += 10
    http = life.http
    gone = wait_trimmed(http, data_dir, "a", count)
    assert http.get("a").body == texts(gone + 1, count)
    assert http.get(f"a?offset={encode_offset(0, 0)}").code == "offset_gone"
    assert http.get("f").body == texts(1, 3)
    wait_deleted(data_dir, "a", {1, 2, 3} | set(range(gone + 1, count + 1)))
    assert http.delete("f").status == 204
    wait_deleted(data_dir, "a", set(range(gone + 1, count + 1)))
    wait_idle(data_dir)
    done = tailrace("verify", "--data-dir", str(data_dir))
    assert done.code == 0, done.out + done.err
    assert http.delete("a").status == 204
    wait_until(lambda: not stored(data_dir, "a"), "nothing left")
