"""Collections end, or begin again: what is written down for it, in which order, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.log.log import append_to_streams
from tailrace.log.transaction import Transaction, ignore_reply
from tailrace.watch import names
from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import Collection, encode_config_entry, encode_control_entry

DoneCallback = Callable[[TailraceError | None], None]


def remove_collection(book: CollectionRegistry, collection: Collection, answer: DoneCallback) -> None:
    """Deletes a collection with all its changes: one record, so that nothing of it is left behind.

    Its name may be used again. What comes then has a higher generation, so that no position of before is
    taken for one of it.
    """
    key = (collection.database, collection.name)
    if key in book.leaving or not collection.durable or collection.pending is not None:
        raise TailraceError("unavailable", "the collection is just being changed")
    streams = [stream for stream in map(book.log.find, collection.streams()) if stream is not None]
    if any(stream.forks for stream in streams):
        raise TailraceError("conflict", "streams were forked from the changes of the collection")

    def settled(_: Transaction, error: TailraceError | None) -> None:
        if error is None:
            book.forget(collection)
        else:
            book.leaving.discard(key)
        answer(error)

    now_ns = book.log.clock.now_ns()
    entry = encode_config_entry(collection.name, collection.config, "delete", now_ns)
    parts = [(names.collections_stream_name(collection.database), [entry])]
    append_to_streams(book.log, parts, now_ns, settled, None, removed=streams)
    book.leaving.add(key)


def raise_generation(
    book: CollectionRegistry, collection: Collection, reason: str, answer: DoneCallback
) -> None:
    """Says that nobody may go on from before: first of the collection, then in each of its partitions.

    The documents stay as they are known. Whoever watches has to be told by the caller, when it is durable.
    """
    base = collection.decided
    planned = base.replaced(generation=base.generation + 1)

    def settled(_: Transaction, error: TailraceError | None) -> None:
        if collection.pending is planned:
            collection.pending = None
        if error is None:
            collection.config = planned
            collection.base, collection.published_ms = None, 0  # its views are those of another generation
            book.view.keep_as(collection.number, book.generation(collection))
            control = encode_control_entry("generation", book.generation(collection), reason=reason)
            streams = [name for name in collection.streams() if book.log.find(name) is not None]
            if streams:
                append_to_streams(
                    book.log,
                    [(name, [control]) for name in streams],
                    book.log.clock.now_ns(),
                    ignore_reply,
                    None,
                )
        answer(error)

    now_ns = book.log.clock.now_ns()
    entry = encode_config_entry(collection.name, planned, "update", now_ns)
    append_to_streams(
        book.log, [(names.collections_stream_name(collection.database), [entry])], now_ns, settled, None
    )
    collection.pending = planned


async def reset_after_view_loss(book: CollectionRegistry, collection: Collection) -> None:
    """Some of what there was cannot be known any more: whoever has seen it has to look again."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(error: TailraceError | None) -> None:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    raise_generation(book, collection, "view-lost", answer)
    await done
