"""Keyed reads and the listing of keys through built indexes.

What is not covered, or cannot be opened, is left to those who look at segments.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from tailrace.log.model import Stream
from tailrace.log.routing_keys import LexiconKeys, LexiconTimes
from tailrace.search.index_files.format import ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON
from tailrace.search.index_files.library import IndexCatalogue
from tailrace.search.index_files.published import IndexFileRef, UnusableFileError
from tailrace.search.index_files.span import UsableFile
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import make_stream_id, stream_prefix

if TYPE_CHECKING:
    from tailrace.search.index_files.key_files import RoutingKeyIndexFile, RoutingKeyLexiconFile

NO_FILES: frozenset[str] = frozenset()
KEY_FILES_CACHED_MAX = 512  # lists of runs


class _CachedKeyFiles(NamedTuple):
    companions: Sequence[IndexFile]
    runs: list[list[UsableFile]]


class RoutingKeyIndex:
    """Lives on the loop, beside the library whose files it reads."""

    def __init__(self, library: IndexCatalogue) -> None:
        self._library = library
        self._kept: OrderedDict[tuple[str, str], _CachedKeyFiles] = OrderedDict()
        self.lookups = 0  # that an index answered

    async def next_with_key(self, stream: Stream, key: bytes, entry: int) -> int:
        """Where to look for a key: at `entry`, or at a later one before which there is none."""
        at = entry
        for run in await self._runs(stream, ROUTING_KEY_INDEX):
            if run[0].companion.last < at:
                continue
            if run[0].companion.first > at:
                break
            following = await self._next_in(run, key, at)
            if following is None:
                break
            at = following
            if at <= run[0].companion.last:
                break
        self.lookups += at > entry
        return at

    async def _next_in(self, run: list[UsableFile], key: bytes, entry: int) -> int | None:
        """Within one run, or the entry behind it; None if that cannot be told."""
        found: list[int] = []
        for served in run:
            file = cast("RoutingKeyIndexFile | None", await self._library.open(served))
            if file is None:
                return None
            try:
                places = file.known(key) or await self._library.shelf.on_thread(file.places, key)
            except UnusableFileError:
                return None
            following = places.next_from(entry)
            if following is not None:
                found.append(following)
        return min(found, default=run[0].companion.last + 1)

    async def first_keys(
        self, stream: Stream, below: int, upto: int, after: bytes | None, wanted: int, times: LexiconTimes
    ) -> LexiconKeys:
        """The first keys that the lexicons of a stream have of the entries behind `below` up to `upto`."""
        on_thread = self._library.shelf.on_thread
        covered: list[tuple[int, int]] = []
        keys: list[bytes] = []
        for run in await self._runs(stream, ROUTING_KEY_LEXICON):
            companion = run[0].companion
            if companion.last > upto or companion.last <= below:
                continue
            listed: list[bytes] | None = []
            for served in run:
                begun_s = time.monotonic()
                file = cast("RoutingKeyLexiconFile | None", await self._library.open(served))
                times.get_s += time.monotonic() - begun_s
                try:
                    more = None if file is None else await on_thread(file.keys, after, wanted, below, times)
                except UnusableFileError:
                    more = None
                if more is None:
                    listed = None
                    break
                listed += more
            if listed is not None:
                keys += listed
                covered.append((companion.first, companion.last))
        return LexiconKeys(covered, keys)

    async def _runs(self, stream: Stream, family: str) -> list[list[UsableFile]]:
        """The files of a family by the range they speak for, in order; a large run may be several files."""
        companions = (await self._library.companions(stream)).companions
        identity = make_stream_id(stream.name, stream.incarnation)
        kept = self._kept.get((identity, family))
        if kept is None or kept.companions is not companions:
            kept = self._kept[identity, family] = _CachedKeyFiles(
                companions, _key_files(companions, family, identity)
            )
            if len(self._kept) > KEY_FILES_CACHED_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end((identity, family))
        return kept.runs


def _key_files(companions: Sequence[IndexFile], family: str, identity: str) -> list[list[UsableFile]]:
    runs: dict[tuple[int, int], list[UsableFile]] = {}
    for companion in companions:
        if companion.family == family:
            runs.setdefault((companion.first, companion.last), []).append(_usable_file(companion, identity))
    return [runs[span] for span in _without_overlaps(runs)]


def _usable_file(companion: IndexFile, identity: str) -> UsableFile:
    key = stream_prefix(identity) + companion.object
    published = IndexFileRef(key, identity, companion.bytes, companion.sha256)
    return UsableFile(companion, published, NO_FILES, True)


def _without_overlaps(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, without those that overlap one before; of those that begin alike the longest stays."""
    kept: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda one: (one[0], -one[1])):
        if not kept or span[0] > kept[-1][1]:
            kept.append(span)
    return kept
