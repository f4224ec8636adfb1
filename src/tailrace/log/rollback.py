"""Back to the last durable state, after a commit that failed."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence

from tailrace.common.errors import TailraceError
from tailrace.log.commit import CommitBatch
from tailrace.log.journal import JournalCorruptError
from tailrace.log.model import Stream
from tailrace.log.recovery import replay_journal
from tailrace.log.rotation import Journal
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.log.transaction import Transaction

logger = logging.getLogger("tailrace.log")

_PRESERVED_FIELDS = frozenset({"readers", "live"})


class Rollback:
    """Takes back what failed commits had assigned, as soon as the disk can be read."""

    def __init__(self, streams: Streams, store: StoredStreams, journal: Journal) -> None:
        self._streams = streams
        self._store = store
        self._journal = journal
        self._undone: dict[int, Stream] | None = None  # streams of a failure that is not rolled back yet

    def begin(self, batches: Sequence[CommitBatch]) -> None:
        """None of these happened."""
        self._undone = {}
        for batch in batches:
            for item in batch.items:
                assert isinstance(item, Transaction)
                self._undone |= {stream.number: stream for stream in item.streams if stream is not None}

    def roll_back(self) -> bool:
        """Rebuilds the state from disk. What readers see is not touched by it, so it can be tried again."""
        if self._undone is None:
            return True
        journal = self._journal
        try:
            # One view of the hot store, whatever the checkpointer does to it meanwhile.
            with self._store.snapshot():
                durable = replay_journal(
                    journal.directory, self._store, (journal.durable_seq, journal.durable_end)
                )
                durable.streams.on_loaded = self._streams.on_loaded
                roll_back(self._streams, durable.streams, self._undone)
        except (OSError, TailraceError, JournalCorruptError):
            logger.exception("the last durable state cannot be read; trying again")
            return False
        self._undone = None
        return True


def journal_unwritable(error: OSError) -> TailraceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TailraceError("insufficient_storage", "the disk is full")
    return TailraceError("unavailable", "the journal cannot be written; the server is trying to recover")


def outcome_unknown(refusal: TailraceError) -> TailraceError:
    """For a change that was written to a journal file which then could neither be synced nor cut.

    Always 503: clients repeat a request after 507, which promises that nothing was changed.
    """
    message = f"{refusal.message}; the outcome of this request is unknown, check the stream before retrying"
    return TailraceError("unavailable", message, outcome="unknown")


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
        restore_stream(stream, fresh)
        durable.by_number[number] = stream
        durable.by_name[stream.name] = stream
    for file, touched in durable.touched.items():
        durable.touched[file] = [durable.by_number.get(stream.number, stream) for stream in touched]
    durable.file = streams.file
    vars(streams).update(vars(durable))


def restore_stream(stream: Stream, fresh: Stream) -> None:
    """Gives a stream its durable state back, keeping its identity and whoever waits on it."""
    # Renewals by readers are written down late; they did happen.
    touched_ns = max(stream.touched_ns, fresh.touched_ns)
    for slot in Stream.__slots__:
        if slot not in _PRESERVED_FIELDS:
            setattr(stream, slot, getattr(fresh, slot))
    stream.touched_ns = touched_ns
