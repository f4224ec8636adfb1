"""Where a bootstrap may work: a data directory that nobody would miss."""

from __future__ import annotations

from pathlib import Path

from tailrace.common.errors import TailraceError
from tailrace.log import registry, system
from tailrace.log.journal import JournalCorruptError, list_files
from tailrace.log.recovery import ReplayResult, replay_journal
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.data_directory import make_directory
from tailrace.storage.hot_store.meta_tables import SUBSCRIPTION_PREFIX


def is_bootstrapped(path: Path) -> bool:
    """Whether a bootstrap got as far as its last step here. Raises if the directory is in use."""
    hot = path / "hot.db"
    make_directory(path / "journal")
    if not hot.exists() and not list_files(path / "journal"):
        return False
    try:
        store = StoredStreams(hot)
        found = replay_journal(path / "journal", store)
        count = _count_streams(store, found)
        subscriptions = sum(key.startswith(SUBSCRIPTION_PREFIX) for key in found.streams.meta)
        finished = store.db.fact("bootstrapped_ns", None) is not None and not found.records
        store.db.close()
    except JournalCorruptError as error:
        raise _refusal(path, f"it holds a journal that cannot be read ({error})") from error
    if finished:
        return True
    if count or subscriptions:
        raise _refusal(path, f"it holds {count} streams and {subscriptions} subscriptions")
    return False


def _count_streams(store: StoredStreams, found: ReplayResult) -> int:
    """Apart from the server's own as long as the registry is empty: one started by mistake makes them."""
    names = {name for name, _ in store.db.images_after("", "", 3)} | found.streams.by_name.keys()
    own = found.streams.find(registry.REGISTRY_STREAM)
    if names <= set(system.BOUNDED_STREAMS) and (own is None or own.tail == 0):
        return 0
    return max(store.db.count_streams(), len(names))


def _refusal(path: Path, why: str) -> TailraceError:
    message = (
        f"--bootstrap needs a data directory without streams, and {path} is none: {why}. To go on with what "
        "is there, start without --bootstrap; to restore from the object store, move hot.db, hot.db-* and "
        "journal/ away first"
    )
    return TailraceError("unavailable", message)
