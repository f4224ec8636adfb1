"""Back to the last durable state, after a commit that failed."""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.log.model import Stream
from tailrace.log.streams import Streams

_KEPT = frozenset({"readers", "live", "used"})


def roll_back(streams: Streams, durable: Streams, known: Mapping[int, Stream]) -> None:
    """Puts a state rebuilt from disk into `streams`, and into the objects that readers hold on to.

    `known` are streams by number that somebody may hold although `streams` has let go of them, because their
    deletion was decided and then failed.
    """
    for number, stream in {**known, **streams.by_number}.items():
        fresh = durable.get(number)
        if fresh is None:
            stream.removed = True  # its creation failed, or its deletion was durable
            continue
        restore(stream, fresh)
        durable.by_number[number] = stream
        durable.by_name[stream.name] = stream
    for file, touched in durable.touched.items():
        durable.touched[file] = [durable.by_number.get(stream.number, stream) for stream in touched]
    durable.file = streams.file
    vars(streams).update(vars(durable))


def restore(stream: Stream, fresh: Stream) -> None:
    """Gives a stream its durable state back, keeping its identity and whoever waits on it."""
    # Renewals by readers are written down late; they did happen.
    touched_ns = max(stream.touched_ns, fresh.touched_ns)
    for slot in Stream.__slots__:
        if slot not in _KEPT:
            setattr(stream, slot, getattr(fresh, slot))
    stream.touched_ns = touched_ns
