"""Which servers are behind the upstreams: one behind all of them, or one behind each."""

from __future__ import annotations

from collections.abc import Callable

DIFFERENT_SERVERS = "the upstreams are different servers: mode any is for one"
SAME_SERVER = "two upstreams are one server: mode sharded is for several"


class DeploymentCheck:
    """Remembers what each upstream was, and says which of them would split streams."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._accepted: dict[str, str] = {}  # by the id of the upstream
        self._last: dict[str, str] = {}  # also of those that were turned away since
        self.on_change: Callable[[], None] = _nothing

    def judge(self, upstream_id: str, deployment: str) -> str:
        """Why an upstream cannot be used, or nothing.

        One that does not answer stays what it was: whoever comes up in its stead has to be the same server.
        """
        others = [known for other, known in self._accepted.items() if other != upstream_id]
        if self._mode == "any" and any(known != deployment for known in others):
            self._accepted.pop(upstream_id, None)
            return DIFFERENT_SERVERS
        if self._mode == "sharded" and deployment in others:
            self._accepted.pop(upstream_id, None)
            return SAME_SERVER
        before = self._last.get(upstream_id, deployment)
        self._accepted[upstream_id] = self._last[upstream_id] = deployment
        if before != deployment:
            self.on_change()
        return ""


def _nothing() -> None:
    """Nobody has to be told."""
