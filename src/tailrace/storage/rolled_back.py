"""Whether the data directory is older than its bucket: asked before a server goes on with the two.

A backup that is put back has the identity of the server that went on after it was made, so nothing else would
refuse it: its next entries would get numbers that the bucket has other entries for. A few streams are asked,
however many there are. Whichever difference they do not show is found when its stream is sealed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.log import system
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.protocol.stream_names import is_system_name
from tailrace.storage.facts import manifest_facts
from tailrace.storage.manifests.manifest import ManifestStore
from tailrace.storage.manifests.manifest_resolve import is_same_incarnation
from tailrace.storage.manifests.model import ManifestError, ManifestHead
from tailrace.storage.segments.segments import make_stream_id

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

SAMPLED_OF_EACH = 8


class RolledBackError(TailraceError):
    """The bucket tells of what this directory has yet to do. Nothing was changed."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(
            "unavailable",
            f"the data directory is older than the object store {url}, which has something of {name!r} that "
            "never happened here: it is a backup, or a copy that others went on from. To go on with what the "
            "bucket has, start with --bootstrap on an empty data directory. To go back to the backup, name a "
            "copy of the bucket that was made together with it. To look at what is here nevertheless, add "
            "--take-over: streams that differ are not sealed then",
        )


async def refuse_rolled_back(objects: ObjectStore, log: Log, fence: int) -> None:
    """Raises if a manifest speaks of what has not happened here. The fence is that of this deployment."""
    manifests = ManifestStore(objects, fence)

    async def look(stream: Stream) -> bool:
        try:
            stored = await manifests.load(make_stream_id(stream.name, stream.incarnation))
        except ManifestError:
            return False  # whoever needs it is told what is wrong with it
        return stored is not None and is_manifest_ahead(stored.head, stream, fence, log.recovered.seq)

    streams = sampled_streams(log)
    ahead = await asyncio.gather(*map(look, streams))
    names = [stream.name for stream, found in zip(streams, ahead, strict=True) if found]
    if names:
        raise RolledBackError(
            objects.url, min(names, key=is_system_name)
        )  # one that somebody knows, if possible


def is_manifest_ahead(head: ManifestHead, stream: Stream, fence: int, journal_seq: int) -> bool:
    """Whether a manifest tells of entries, or was made from a journal file, that this directory never had."""
    later_file = head.fence == fence and head.as_of > journal_seq
    return is_same_incarnation(manifest_facts(stream, 0), head) and (
        later_file or head.uploaded_through > stream.tail
    )


def sampled_streams(log: Log) -> list[Stream]:
    """Those that a server which went on would have sealed more of, most likely."""
    found = (log.streams.get(number) for number in dict.fromkeys(_sampled_numbers(log)))
    return [stream for stream in found if stream is not None]


def _sampled_numbers(log: Log) -> Iterator[int]:
    for (
        name
    ) in system.BOUNDED_STREAMS:  # is written as long as the server runs, or whenever something happens
        stream = log.streams.find(name + log.own_suffix)
        if stream is not None:
            yield stream.number
    yield from tuple(islice(log.streams.by_number, SAMPLED_OF_EACH))  # with records in the journal
    yield from log.store.db.cold.hot_numbers(0, SAMPLED_OF_EACH)
    yield from log.store.db.newest_numbers(SAMPLED_OF_EACH)
