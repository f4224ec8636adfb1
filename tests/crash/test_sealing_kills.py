"""SIGKILL at every step from the hot store to the object store: nothing is lost, nothing is there twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cli import tailrace
from support.sealing import SEALING_ENV, hot, wait_sealed, wait_until
from support.server import ServerProcess
from support.wire import Answer, Wire
from tailrace.common.failpoints import NAMES

JSON = "application/json"
# Each step, and some of them when others have been through it before.
SEALING = [f"{name}:1" for name in NAMES if name.startswith("seal.")]
SEALING += [f"seal.{step}:3" for step in ("after_write", "after_upload", "after_manifest", "before_trim")]
COLLECTING = ["gc.before_delete", "gc.after_delete"]
APPENDS = 14


class Life:
    """A server that dies once at a failpoint and is started again by whoever notices."""

    def __init__(self, data_dir: Path, failpoint: str) -> None:
        self.server = ServerProcess(data_dir, env={**SEALING_ENV, "TAILRACE_FAILPOINT": failpoint}).start()
        self.http = Wire(self.server.port)
        self.died = False

    @property
    def data_dir(self) -> Path:
        return self.server.data_dir

    def call(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> Answer:
        """Asks until there is an answer. An idempotent producer makes the repeat of an append harmless."""
        while True:
            try:
                return self.http.call(method, path, headers, body)
            except (OSError, AssertionError):
                self.http.close()
                self.revive()

    def revive(self) -> None:
        assert not self.died, "it died twice"
        self.died = True
        self.server.wait_exit()
        del self.server.env["TAILRACE_FAILPOINT"]
        self.server.start()

    def produce(self, name: str, seq: int) -> None:
        headers = {
            "Content-Type": JSON,
            "Producer-Id": "p",
            "Producer-Epoch": "0",
            "Producer-Seq": str(seq),
            "Stream-Key": f"k{seq % 2}",
        }
        assert self.call("POST", name, headers, b'{"seq":%d}' % seq).status in (200, 204)

    def wait_for_death(self) -> None:
        if not self.died:
            wait_until(lambda: not self.server.running, "the failpoint reached")
            self.http.close()
            self.revive()

    def check(self, name: str, count: int) -> None:
        expected = b"[" + b",".join(b'{"seq":%d}' % seq for seq in range(count)) + b"]"
        assert self.call("GET", name, {}).body == expected
        odd = b"[" + b",".join(b'{"seq":%d}' % seq for seq in range(1, count, 2)) + b"]"
        assert self.call("GET", f"{name}?key=k1", {}).body == odd

    def check_bucket(self) -> None:
        """Manifests, segments and their checksums agree, and nothing lies around that nobody knows."""
        done = tailrace("verify", "--data-dir", str(self.data_dir))
        assert done.code == 0, done.out + done.err


Begin = Callable[[str], Life]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    lives: list[Life] = []

    def started(failpoint: str) -> Life:
        lives.append(Life(tmp_path / "data", failpoint))
        return lives[-1]

    yield started
    for life in lives:
        life.http.close()
        life.server.kill()


@pytest.mark.parametrize("failpoint", SEALING)
def test_a_crash_while_sealing(begin: Begin, failpoint: str) -> None:
    life = begin(failpoint)
    assert life.call("PUT", "a", {"Content-Type": JSON}).status in (200, 201)
    for seq in range(APPENDS):
        life.produce("a", seq)
        if seq % 5 == 4:
            wait_until(
                lambda: life.died or not life.server.running or hot(life.data_dir).get("segments"),
                "segments, or death",
            )
    # Steps may come together: another stream gives reasons for more of them.
    assert life.call("PUT", "b", {"Content-Type": JSON}).status in (200, 201)
    for seq in range(100):
        if life.died:
            break
        life.produce("b", seq)
        life.call("POST", "/v1/server/_seal", {})
    life.wait_for_death()
    life.check("a", APPENDS)
    wait_sealed(life.data_dir)
    life.check("a", APPENDS)
    # The producer's state came through as well: what was taken is not taken again.
    life.produce("a", APPENDS - 1)
    life.produce("a", APPENDS)
    life.check("a", APPENDS + 1)
    wait_sealed(life.data_dir)
    life.check_bucket()
    life.http.close()
    life.server.restart(kill=True)
    life.check("a", APPENDS + 1)


@pytest.mark.parametrize("failpoint", COLLECTING)
def test_a_crash_while_objects_are_deleted(begin: Begin, failpoint: str) -> None:
    life = begin(failpoint)
    for name in ("kept", "gone"):
        assert life.call("PUT", name, {"Content-Type": JSON}).status == 201
        for seq in range(5):
            life.produce(name, seq)
    wait_sealed(life.data_dir)
    assert life.call("DELETE", "gone", {}).status == 204
    life.wait_for_death()
    assert life.call("GET", "gone", {}).status == 404
    wait_sealed(life.data_dir)
    life.check("kept", 5)
    life.check_bucket()
    segments = list((life.data_dir / "objects").rglob("*.parquet"))
    assert not [path for path in segments if b"tailrace.name\x18\x04gone" in path.read_bytes()]
    # The name's next life shares nothing with the one before.
    assert life.call("PUT", "gone", {"Content-Type": JSON}).status == 201
    life.produce("gone", 0)
    wait_sealed(life.data_dir)
    life.check("gone", 1)
    life.check("kept", 5)
    life.check_bucket()
