"""Changes that leave out what their documents were before: the view still has it when they are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tailrace.watch.befores import BeforeImageCache, BeforeImageLimits
from tailrace.watch.change import Change
from tailrace.watch.collection import Collection
from tailrace.watch.view import DocumentRow, DocumentView


def complete_before_images(
    view: DocumentView,
    collection: Collection,
    changes: Sequence[Change],
    rows: Iterable[DocumentRow],
    bounds: BeforeImageLimits,
) -> bool:
    """Whether all of them, in the order of the log, say now what was there before.

    `rows` are what was looked at already and is not in the view yet.
    """
    wanted = {change.entry.documentKey for change in changes if change.is_half}
    known = {row.id: (row.version, row.data) for row in rows if row.id in wanted}
    stored = view.find_many(collection.number, [one for one in wanted if one not in known])
    known |= {row.id: (row.version, row.data) for row in stored.values()}
    if collection.befores is None:
        collection.befores = BeforeImageCache(bounds, [0] * collection.config.partitions)
    whole = True
    for change in changes:
        entry = change.entry
        if entry.documentKey not in wanted:
            continue
        if change.is_half:
            version, data = known.get(entry.documentKey, (0, b""))
            if entry.prev is not None and entry.prev.version == version:
                change.complete(data)
                collection.befores.add(change.partition, change.seq, change.updated_ms, data)
            else:
                whole = False
        if entry.op != "delete":
            known[entry.documentKey] = (entry.version, bytes(entry.after))
    return whole


def complete_from_cache(collection: Collection, change: Change) -> None:
    """As `complete`, for a change that is read again: as long as it is remembered."""
    if change.is_half and collection.befores is not None:
        data = collection.befores.find(change.partition, change.seq)
        if data is not None:
            change.complete(data)
