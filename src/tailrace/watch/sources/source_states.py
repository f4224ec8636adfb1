"""The collections of a source: loading, live or stale, and what that means for whoever watches them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tailrace.common.errors import TailraceError
from tailrace.watch import names
from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import Collection, CollectionState, encode_config_entry, encode_control_entry
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.sources.config import SourceConfig
from tailrace.watch.sources.source_ingest import SourceIngest, SupersededError
from tailrace.watch.sources.source_progress import (
    SourceProgress,
    decode_progress,
    progress_fact,
    source_stream_name,
)

StreamEntries = list[tuple[str, list[bytes]]]


class SourceLifecycle:
    """Every change of state is one commit: in all partitions, in the configuration, in the progress."""

    def __init__(
        self,
        book: CollectionRegistry,
        gateway: Gateway,
        database: str,
        config: SourceConfig,
        collections: Mapping[str, Collection],
        document_bytes: int,
        on_changed: Callable[[Collection], None],
    ) -> None:
        self._book = book
        self._gateway = gateway
        self._on_changed = on_changed
        self._database = database
        self._config = config
        self._document_bytes = document_bytes
        self.collections = collections
        self._ingest: SourceIngest | None = None
        self._epoch = self.progress.epoch

    @property
    def progress(self) -> SourceProgress:
        """What was decided last, which is as good as durable: nothing behind it can be without it."""
        return decode_progress(
            self._book.log.streams.meta.get(progress_fact(self._database, self._config.name))
        )

    @property
    def counts(self) -> dict[str, int]:
        return {} if self._ingest is None else dict(self._ingest.counts)

    @property
    def repeats(self) -> int:
        return 0 if self._ingest is None else self._ingest.repeats

    def ingest(self) -> SourceIngest:
        """The way into the log, from where the source is."""
        before, progress = self._ingest, self.progress
        if progress.epoch > self._epoch:
            raise SupersededError
        fresh = SourceIngest(
            self._book, self._database, self._config, self.collections, progress, self._document_bytes
        )
        if before is not None:
            fresh.counts, fresh.repeats = before.counts, before.repeats
        self._ingest = fresh
        return fresh

    async def settled(self) -> None:
        """Waits until all that was decided so far is durable or undone: only then the view is right."""
        newest = self._book.log.committer.newest
        if newest is None:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell(_: TailraceError | None) -> None:
            if not done.done():
                done.set_result(None)

        newest.waiting.append(tell)
        await done

    def apply(self) -> None:
        """After a start: the collections are as the source is."""
        phase = self.progress.phase
        for collection in self.collections.values():
            collection.state = "loading" if phase == "new" else phase

    # -- from one state to another ---------------------------------------------------------------------

    async def raise_epoch(self) -> None:
        """Whoever follows the source from now on, it is nobody who began before."""
        self._epoch = self.progress.epoch
        ingest = self.ingest()
        before = self._epoch
        # Known at once: whoever halts this while it waits goes on from what is decided.
        self._epoch = ingest.progress.epoch + 1
        try:
            await ingest.commit([], ingest.progress.replaced(epoch=self._epoch), self._now_ns())
        except TailraceError:
            self._epoch = before
            raise

    async def lose(self, reason: str, *, rescan: bool) -> None:
        """Something is missing: nobody is told anything until it is there again."""
        ingest = self.ingest()
        progress = ingest.progress.replaced(phase="stale", reason=reason, rescan=rescan)
        now_ns = self._now_ns()
        parts = self._controls("stale", reason=reason)
        await ingest.commit([*parts, self._told(progress, now_ns)], progress, now_ns)
        self._become("stale", reason)

    async def begin_load(self, ingest: SourceIngest, progress: SourceProgress) -> None:
        """From here on the source is copied. What anybody has seen before is of another generation."""
        await self._begin(ingest, progress.replaced(phase="loading"), "load-begin")

    async def begin_now(self, ingest: SourceIngest, progress: SourceProgress) -> None:
        """From here on the source is followed; what it had before is not asked for."""
        await self._begin(ingest, progress.replaced(phase="live"), "live")

    async def reset(self, ingest: SourceIngest) -> None:
        """The source begins anew: so does everybody who watches."""
        await self._begin(ingest, ingest.progress.replaced(phase="loading"), "load-begin")

    async def end_load(self, ingest: SourceIngest) -> None:
        """The collections are what the source is: everybody may be told."""
        progress = ingest.progress.replaced(phase="live")
        now_ns = self._now_ns()
        parts = self._controls("load-end", "live")
        await ingest.commit([*parts, self._told(progress, now_ns)], progress, now_ns)
        self._become("live")

    async def _begin(self, ingest: SourceIngest, progress: SourceProgress, control: str) -> None:
        now_ns = self._now_ns()
        # A collection without any change has nothing that could be continued wrongly.
        older = [one for one in self.collections.values() if any(one.applied)]
        raised = {one: one.decided.replaced(generation=one.config.generation + 1) for one in older}
        for collection, config in raised.items():
            collection.pending = config  # what is set about it meanwhile builds on this
        parts: StreamEntries = []
        if raised:
            entries = [
                encode_config_entry(one.name, config, "update", now_ns) for one, config in raised.items()
            ]
            parts.append((names.collections_stream_name(self._database), entries))
        for collection in self.collections.values():
            generation = self._book.generation(collection) + (collection in raised)
            entries = [encode_control_entry(control, generation)]
            if collection in raised:
                entries.insert(0, encode_control_entry("generation", generation, reason="source"))
            parts += [(stream, entries) for stream in collection.streams()]
        try:
            await ingest.commit([*parts, self._told(progress, now_ns)], progress, now_ns)
        finally:
            for collection, config in raised.items():
                if collection.pending is config:
                    collection.pending = None
        for collection, config in raised.items():
            collection.config = config
            self._book.view.keep_as(collection.number, self._book.generation(collection))
        self._become("live" if progress.phase == "live" else "loading")
        for collection in raised:
            self._gateway.invalidate_all(collection, "generation")

    # -- inside ----------------------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return self._book.log.clock.now_ns()

    def _told(self, progress: SourceProgress, now_ns: int) -> tuple[str, list[bytes]]:
        return source_stream_name(self._database, self._config.name), [progress.entry(now_ns)]

    def _controls(self, *controls: str, **more: str) -> StreamEntries:
        parts: StreamEntries = []
        for collection in self.collections.values():
            generation = self._book.generation(collection)
            entries = [encode_control_entry(control, generation, **more) for control in controls]
            parts += [(stream, entries) for stream in collection.streams()]
        return parts

    def _become(self, state: CollectionState, reason: str = "") -> None:
        for collection in self.collections.values():
            collection.state = state
            self._gateway.on_state(collection, reason)
            self._on_changed(collection)
