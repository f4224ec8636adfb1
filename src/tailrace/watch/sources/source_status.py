"""What can be said of a source while the server runs."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.common.clock import Clock
from tailrace.common.timestamps import format_rfc3339, parse_rfc3339_ns


class SourceStatus(msgspec.Struct, kw_only=True):
    """Numbers of one process; what has to outlive it is in the progress."""

    clock: Clock
    connected: bool = False
    error: str | None = None
    restarts: int = 0
    gaps: int = 0
    loaded: int | None = None  # rows of the last copy that this process made
    confirmed: int = 0  # where the slot is
    lag_bytes: int | None = None
    wal_status: str | None = None
    retained_bytes: int | None = None
    last_ns: int = 0  # when the last change was committed at the source
    behind: bool = True  # there may be more to read
    lag_changes: int = 0  # that the source is known to have and that are not written down yet

    def changed(self, time: str) -> None:
        self.last_ns = parse_rfc3339_ns(time) or self.last_ns

    def caught_up(self, all_read: bool) -> None:
        self.behind = not all_read
        # How many more a database has it does not say: at least one.
        self.lag_changes = 0 if all_read else max(1, self.lag_changes)

    @property
    def lag_s(self) -> float:
        """How old the newest change is that was read, as long as there may be more."""
        if not self.behind or not self.last_ns:
            return 0.0
        return max(0, self.clock.now_ns() - self.last_ns) / 1e9

    def shown(self) -> dict[str, Any]:
        """What is not known is null: the lag of a source that cannot be reached, or was not read yet."""
        is_measured = self.connected and (not self.behind or self.lag_changes > 0)
        is_timed = self.connected and (not self.behind or self.last_ns > 0)
        return {
            "connected": self.connected,
            "error": self.error,
            "restarts": self.restarts,
            "gaps": self.gaps,
            "loaded": self.loaded,
            "lagBytes": self.lag_bytes,
            "lagChanges": self.lag_changes if is_measured else None,
            "lagSeconds": round(self.lag_s, 3) if is_timed else None,
            "walStatus": self.wal_status,
            "retainedBytes": self.retained_bytes,
            "lastChangeAt": format_rfc3339(self.last_ns) if self.last_ns else None,
        }
