"""The streams that use most, kept up to date a few at a time, however many streams there are."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest

from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.server.descriptor import unsealed_bytes
from tailrace.server.live import LiveReaders

TOP_SHOWN = 10
CANDIDATES_MAX = 64  # each of them may have to be looked up in the hot store when it is shown
PER_TURN = 1000  # streams looked at in one turn

TopStreamRow = dict[str, object]


class TopStreams:
    """`look` comes twice a second and passes over some of the streams in the present journal file."""

    def __init__(self, log: Log, live: LiveReaders) -> None:
        self._log = log
        self._live = live
        self._pending: dict[int, int] = {}  # number to bytes, of the largest
        self._file = 0
        self._looked_at = 0
        self.cached_bytes_of: Callable[[Stream], int] = lambda _: 0
        self.touch_journals: Callable[[], list[tuple[int, str]]] = list[tuple[int, str]]

    def look(self) -> None:
        streams = self._log.streams
        touched = streams.touched.get(streams.file, ())
        if streams.file != self._file or self._looked_at >= len(touched):
            self._file, self._looked_at = streams.file, 0
        for stream in touched[self._looked_at : self._looked_at + PER_TURN]:
            if not stream.removed:
                self._pending[stream.number] = unsealed_bytes(stream)
        self._looked_at += PER_TURN
        if len(self._pending) > CANDIDATES_MAX:
            self._pending = dict(
                nlargest(CANDIDATES_MAX // 2, self._pending.items(), key=lambda item: item[1])
            )

    def shown(self) -> dict[str, list[TopStreamRow]]:
        waiting = nlargest(TOP_SHOWN, self._live.by_stream.items(), key=lambda item: item[1])
        current = [stream for number in list(self._pending) if (stream := self._find(number)) is not None]
        pending = nlargest(TOP_SHOWN, [(unsealed_bytes(stream), stream.name) for stream in current])
        local = nlargest(
            TOP_SHOWN,
            [(unsealed_bytes(stream) + self.cached_bytes_of(stream), stream.name) for stream in current],
        )
        return {
            "local_storage_bytes": [{"stream": name, "bytes": size} for size, name in local if size],
            "pending_wal_bytes": [{"stream": name, "bytes": size} for size, name in pending if size],
            "touch_journal_filter_bytes": [
                {"stream": name, "bytes": size}
                for size, name in nlargest(TOP_SHOWN, self.touch_journals())
                if size
            ],
            "notifier_waiters": [{"stream": stream.name, "waiters": count} for stream, count in waiting],
        }

    def _find(self, number: int) -> Stream | None:
        """As it is now; one that is not in memory is looked up without being brought back."""
        streams = self._log.streams
        stream = streams.by_number.get(number)
        if stream is None and number not in streams.removed:
            stream = self._log.store.stream_by_number(number)
        if stream is None:
            del self._pending[number]
        return stream
