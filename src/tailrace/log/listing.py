"""Listing streams: a merge of two ordered sources, the hot store's name index and what changed since."""

from __future__ import annotations

from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.stored_streams import decode_stream


def list_streams(log: Log, after: str, prefix: str, limit: int, system: bool) -> list[Stream]:
    """Up to `limit` streams in byte order of their names. The cost grows with the limit, not with the log."""
    now_ns = log.clock.now_ns()
    found: list[Stream] = []
    while len(found) < limit:
        names, exhausted = _names_after(log, after, prefix, limit - len(found) + 1)
        for name, stored in names:
            after = name
            if not system and (name.startswith(("__", "hub/"))):
                continue
            stream = log.streams.by_name.get(name) or stored
            if stream is None or stream.gone or stream.visible < 0 or stream.expired(now_ns):
                continue
            found.append(stream)
            if len(found) == limit:
                break
        if exhausted:
            break
    return found


def _names_after(
    log: Log, after: str, prefix: str, limit: int
) -> tuple[list[tuple[str, Stream | None]], bool]:
    """The next names of either source; a stored stream comes with its image, one in memory without."""
    streams = log.streams
    merged: dict[str, Stream | None] = {}
    rows = log.store.db.images_after(after, prefix, limit)
    for name, image in rows:
        if name.startswith(prefix) and name not in streams.changed_names:
            merged[name] = None if name in streams.by_name else decode_stream(image)
    begin = max(after, prefix)
    taken = 0
    for name in streams.changed_names.irange(begin):
        if not name.startswith(prefix) or taken >= limit:
            break
        if name > after:
            merged[name] = None
            taken += 1
    ordered = sorted(merged.items())
    # A source that was cut at the limit may have more in between; only names up to its cut are complete.
    cuts = [rows[-1][0]] if len(rows) == limit else []
    if taken >= limit:
        cuts.append(max(name for name in merged if name in streams.changed_names))
    if cuts:
        bound = min(cuts)
        ordered = [(name, stream) for name, stream in ordered if name <= bound]
    past_prefix = bool(rows) and not rows[-1][0].startswith(prefix)
    return ordered, not cuts or (past_prefix and taken < limit)
