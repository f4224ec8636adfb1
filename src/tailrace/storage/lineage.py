"""Forks and their sources on the object store: what a fork inherits is there before the fork is.

A fork copies nothing. Recorded before its source is sealed as far as the fork shows it, its manifest would
name entries that the bucket does not have, and a server restored from there would show the fork with a gap.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.log.model import Stream
from tailrace.storage.due import DueStreams

FindStream = Callable[[int], Stream | None]


def unsealed_source(stream: Stream, find: FindStream) -> Stream | None:
    """The nearest ancestor with entries that the stream shows and that are not sealed yet."""
    earliest, upto = stream.earliest, stream.fork_entry
    while stream.parent and earliest < upto:
        source = find(stream.parent)
        assert source is not None, f"the source of fork {stream.name} is missing"
        if source.fork_entry < upto and source.sealed < upto:
            return source
        upto = min(upto, source.fork_entry)
        stream = source
    return None


class ForkDependencies:
    """Which forks wait for which sources. A source that somebody waits for is due."""

    def __init__(self, due: DueStreams, find: FindStream) -> None:
        self._due = due
        self._find = find
        self._waiting: dict[int, set[int]] = {}

    def must_wait(self, stream: Stream) -> bool:
        """Whether the stream may not be sealed or recorded yet; if so, its source is due from now on."""
        source = unsealed_source(stream, self._find)
        if source is None:
            return False
        self._due.add(source.number)
        return True

    def wait(self, stream: Stream) -> bool:
        """The same, for a fork that is to be due again when its source is sealed."""
        source = unsealed_source(stream, self._find)
        if source is None:
            return False
        self._waiting.setdefault(source.number, set()).add(stream.number)
        self._due.add(source.number)
        return True

    def sealed(self, number: int) -> None:
        """A source came further, or has nothing to seal."""
        for fork in self._waiting.pop(number, ()):
            self._due.add(fork)
