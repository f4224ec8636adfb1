"""How far a streaming query is behind the streams it reads."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.protocol import offsets
from tailrace.spark.options import OptionReader, parse_connection
from tailrace.spark.server_client import ServerClient
from tailrace.storage.segments.parquet import pa


class StreamLag(NamedTuple):
    """Entries that were not read yet, and how long the oldest of them has been there."""

    entries: int
    seconds: float


def lag(progress: Any, **options: str) -> dict[str, StreamLag]:
    """The lag of each stream, out of a `StreamingQueryProgress`.

    Options are those of the connection (`endpoint`, `token`, ...): how long the oldest entry has been waiting
    is asked of the server, for streams that are behind only.
    """
    behind: dict[str, tuple[str, int]] = {}
    for source in progress.sources:
        ends, tails = _decode_offsets(source.endOffset), _decode_offsets(source.latestOffset)
        for name, tail in tails.items():
            end = ends.get(name, offsets.START_OFFSET)
            behind[name] = end, max(0, offsets.parse_offset(tail)[1] - offsets.parse_offset(end)[1])
    server = ServerClient(parse_connection(OptionReader(options)))
    try:
        return {
            name: StreamLag(entries, _oldest_entry_age_s(server, name, end) if entries else 0.0)
            for name, (end, entries) in behind.items()
        }
    finally:
        server.close()


def _decode_offsets(text: str | None) -> dict[str, str]:
    """The offsets of one of our sources; nothing for a source of another kind."""
    try:
        found = msgspec.json.decode(text or "{}", type=dict[str, str])
        for name, offset in found.items():
            if not name.startswith("/"):
                offsets.parse_offset(offset)
    except (msgspec.MsgspecError, TailraceError):
        return {}
    return {name: offset for name, offset in found.items() if not name.startswith("/")}


def _oldest_entry_age_s(server: ServerClient, name: str, end: str) -> float:
    page = server.rows(name, offset=end, entries_max=1)
    rows = pa.ipc.open_stream(page.body).read_next_batch()
    if not rows.num_rows:
        return 0.0
    appended_us: int = rows.column("append_time")[0].value
    return max(0.0, time.time() - appended_us / 1e6)
