"""Streams of which the bucket has other entries than we have: kept and served here, and not sealed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream

logger = logging.getLogger("tailrace.seal")

CONFLICT_ADVICE = (
    "The data directory is older than the bucket, or another server runs on a copy of it: see 'Backup, "
    "restore, upgrade' in docs/operations.md"
)


class SealConflicts:
    """Told once for each stream; afterwards metrics, /readyz and the stream's details show it."""

    def __init__(self, find: Callable[[int], Stream | None]) -> None:
        self._find = find
        self._names: dict[int, str] = {}
        self.resting: set[int] = set()  # those that are not tried again before their time

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, number: int) -> bool:
        return number in self._names

    def found(self, stream: Stream, why: str) -> None:
        self.resting.add(stream.number)
        if stream.number not in self._names:
            self._names[stream.number] = stream.name
            logger.error("stream %r is not sealed any more: %s. %s", stream.name, why, CONFLICT_ADVICE)

    def over(self, number: int) -> None:
        """The stream was sealed or removed, or somebody wants to know anew."""
        self._names.pop(number, None)
        self.resting.discard(number)

    def refusal(self, stream: Stream) -> TailraceError | None:
        """Why the stream cannot be sealed: it is in conflict, or the source of the fork that it is."""
        found: Stream | None = stream
        while found is not None and self._names:
            if found.number in self._names:
                message = f"the object store has other entries of {found.name!r} than this server. {CONFLICT_ADVICE}"
                return TailraceError("conflict", message)
            found = self._find(found.parent) if found.parent else None
        return None

    @property
    def state(self) -> str:
        """One line, for whoever asks whether the server is well; nothing if there are none."""
        if not self._names:
            return ""
        more = f" and {len(self._names) - 1} more" if len(self._names) > 1 else ""
        named = next(iter(self._names.values()))
        return f"conflict: it has other entries than this server of stream {named!r}{more}"
