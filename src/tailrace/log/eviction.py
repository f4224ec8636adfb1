"""What memory may let go of once the hot store has it."""

from __future__ import annotations

from tailrace.log import outbox, registry
from tailrace.log.model import Stream
from tailrace.log.streams import Streams

NEVER_EVICTED = (
    registry.REGISTRY_STREAM,
    outbox.SEGMENTS_STREAM,
)  # their bounds are settings, which the hot store does not have


def release_checkpointed(streams: Streams, seq: int) -> list[Stream]:
    """Frees what was published up to this journal file; the answer is which streams had records in it."""
    touched: list[Stream] = []
    for file in [file for file in streams.touched if file <= seq]:
        for stream in streams.touched.pop(file):
            if not stream.removed:
                streams.drop_through(stream, seq)
                touched.append(stream)
    for name in [name for name, file in streams.changed_names.items() if file <= seq]:
        del streams.changed_names[name]
        streams.tombstones.pop(name, None)
    for number in [number for number, file in streams.removed.items() if file <= seq]:
        del streams.removed[number]
    streams.folded(seq)
    return touched


def evict_idle(streams: Streams, seq: int) -> None:
    """Forgets streams that nobody uses and the hot store has; the name index finds them again."""
    for stream in list(streams.by_number.values()):
        in_use = stream.readers is not None or stream.batch is not None or stream.live
        in_use = in_use or stream.forks or stream.leaving
        saved = stream.recent_file <= seq and stream.touched_ns == stream.touched_saved_ns
        if (
            saved
            and not in_use
            and stream.visible == stream.stored
            and not stream.name.startswith(NEVER_EVICTED)
        ):
            streams.forget(stream)
