"""SIGKILL at every step of the hub between a decision, the disk and the sockets.

Nothing that was accepted is lost or there twice, nobody hears a message twice without being told so, what was
committed does not come again, and a message that was rejected has one letter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from websockets.exceptions import WebSocketException

from crash.test_hub_broadcast_kills import BROADCAST_STEPS
from crash.test_hub_kills import Ordeal
from tailrace.common.failpoints import NAMES

STEPS = [name for name in NAMES if name.startswith("hub.") and name not in BROADCAST_STEPS]
# Each step, and some of them when others have been through it before.
FAILPOINTS = [f"{name}:1" for name in STEPS]
FAILPOINTS += [f"hub.{when}_{what}:7" for what in ("message", "cursor") for when in ("before", "after")]
FAILPOINTS += ["hub.after_letter:2", "hub.before_publish:20"]
ACTS = {"send": 60, "commit": 30, "listen": 10}
STEPS_MAX = 400
STEPS_AFTER = 20


class Life(Ordeal):
    """A server that dies once, wherever it was told to."""

    def __init__(self, directory: Path, failpoint: str) -> None:
        super().__init__(directory, 1, TAILRACE_FAILPOINT=failpoint)
        self.died = False

    def lead(self) -> None:
        """Until it has died, and a little longer."""
        self.guard("begin")
        self.guard("attack")
        for _ in range(STEPS_MAX):
            if self.died:
                break
            self.guard(self.random.choices(list(ACTS), list(ACTS.values()))[0])
        assert self.died, "the step was reached"
        for _ in range(STEPS_AFTER):
            getattr(self, self.random.choices(list(ACTS), list(ACTS.values()))[0])()

    def guard(self, act: str) -> None:
        """Whatever is begun when the server dies is left at that; everybody comes back and repeats it."""
        try:
            getattr(self, act)()
        except (WebSocketException, OSError, TimeoutError):
            self.server.wait_exit()
            assert not self.died, "it died twice"
            self.died = True
            del self.server.env["TAILRACE_FAILPOINT"]
            self.revive()
            self.begin()


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_h18_h19_h20_h33_a_crash_at_any_step_of_the_hub(tmp_path: Path, failpoint: str) -> None:
    life = Life(tmp_path, failpoint)
    try:
        life.lead()
        life.restart_quietly()
        life.finish()
        life.check()
    finally:
        life.end()
