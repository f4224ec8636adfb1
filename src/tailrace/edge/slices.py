"""Reads of slices: from the cache, together with an equal read that is under way, or from upstream."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from tailrace.edge.asks import Reading, stream_target
from tailrace.edge.cache import MemoryCache, Slice
from tailrace.edge.channels import Channels
from tailrace.edge.connection import UpstreamLostError
from tailrace.edge.context import EdgeContext
from tailrace.edge.disk import DiskCache
from tailrace.edge.facts import FactBook, Facts
from tailrace.edge.feed import Answer, RefusedError
from tailrace.edge.gate import Caller
from tailrace.edge.registry import Registry
from tailrace.errors import TailraceError

RECENT_BYTES_MAX = 32 * 1024 * 1024

SliceKey = tuple[str, str, str, str, str]  # name, filter, format, key, offset


class Flight(NamedTuple):
    """A read that is under way, and what was known when it was sent."""

    task: asyncio.Task[Slice]
    writes: int


class Recent(NamedTuple):
    """An answer at the tail: given again for a moment, and after that a thing to compare with."""

    slice: Slice
    generation: int
    writes: int
    at: float


class Slices:
    """Answers catch-up reads. Who may read is decided before."""

    def __init__(
        self,
        context: EdgeContext,
        book: FactBook,
        channels: Channels,
        memory: MemoryCache,
        disk: DiskCache | None,
        registry: Registry,
        *,
        verifies: bool,
    ) -> None:
        self._context = context
        self._book = book
        self._channels = channels
        self._memory = memory
        self._disk = disk
        self._registry = registry
        self._verifies = verifies
        self._flights: dict[SliceKey, Flight] = {}
        self._recent: OrderedDict[SliceKey, Recent] = OrderedDict()
        self._recent_bytes = 0
        self._confirming: dict[str, asyncio.Task[None]] = {}

    async def get(self, reading: Reading, caller: Caller) -> tuple[Slice, str]:
        """A slice, and what X-Cache says of it. Raises what the upstream says if that is a no."""
        found = await self.at_hand(reading, caller)
        return (found, "HIT") if found is not None else (await self.fetched(reading, caller), "MISS")

    async def at_hand(self, reading: Reading, caller: Caller) -> Slice | None:
        """What may be given without asking the upstream for it."""
        key = key_of(reading)
        facts = self._book.of(reading.name)
        kept = await self._kept(key, facts, caller)
        if kept is not None:
            return kept
        recent = self._recent.get(key)
        if recent is None or recent.writes != facts.writes:
            return None
        if self._context.loop.time() - recent.at >= self._context.limits.edge_recent_ms / 1000:
            return None
        self._context.telemetry.edge_recent_hits.value += 1
        return recent.slice

    async def fetched(self, reading: Reading, caller: Caller) -> Slice:
        """What the upstream says now, or is just about to say to somebody else."""
        key = key_of(reading)
        facts = self._book.of(reading.name)
        flight = self._flights.get(key)
        if flight is not None and flight.writes == facts.writes:
            self._context.telemetry.edge_coalesced.value += 1
            try:
                return await asyncio.shield(flight.task)
            except UpstreamLostError:
                pass  # tried once on its own
            except RefusedError as refused:
                if refused.refusal.status not in (401, 403):
                    raise
        return await asyncio.shield(self._fly(key, reading, caller, facts))

    def end(self, name: str) -> str:
        return self._book.of(name).end

    # -- the cache

    async def _kept(self, key: SliceKey, facts: Facts, caller: Caller) -> Slice | None:
        """What is kept, once it is known that the stream still exists."""
        if key not in self._memory and (self._disk is None or not self._disk.may_have(key)):
            return None
        if not self._is_confirmed(facts):
            await self._confirm(key[0], caller)
        if not self._is_confirmed(facts):
            return None
        found = self._memory.get(key)
        if found is None and self._disk is not None:
            generation = facts.generation
            found = await self._disk.get(key, facts.epoch)
            if facts.generation != generation:
                return None
            if found is not None:
                self._memory.put(key, found)
        return found

    def _is_confirmed(self, facts: Facts) -> bool:
        if self._registry.vouches_since(facts.confirmed_at):
            return True
        age_s = self._context.loop.time() - facts.confirmed_at
        return age_s < self._context.limits.edge_confirm_ms / 1000

    async def _confirm(self, name: str, caller: Caller) -> None:
        """Asks whether a stream exists; all who wonder at once ask together."""
        task = self._confirming.get(name)
        if task is None:
            task = self._context.loop.create_task(self._look(name, caller.authorization))
            self._confirming[name] = task
            task.add_done_callback(lambda _: self._confirming.pop(name, None))
        await asyncio.shield(task)

    async def _look(self, name: str, authorization: bytes | None) -> None:
        try:
            await self._channels.head(name, self._context.token or authorization)
        except (RefusedError, UpstreamLostError, TailraceError):
            return  # what it told is noted; the read itself says the rest

    # -- reading upstream

    def _fly(self, key: SliceKey, reading: Reading, caller: Caller, facts: Facts) -> asyncio.Task[Slice]:
        task = self._context.loop.create_task(self._fetch(key, reading, caller, facts))
        flight = self._flights[key] = Flight(task, facts.writes)

        def landed(_: asyncio.Task[Slice]) -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]
            if not task.cancelled():
                task.exception()

        task.add_done_callback(landed)
        return task

    async def _fetch(self, key: SliceKey, reading: Reading, caller: Caller, facts: Facts) -> Slice:
        context = self._context
        generation, writes = facts.generation, facts.writes
        upstream = context.upstreams.of(reading.name)
        known = self._recent.get(key)
        if known is not None and known.generation != generation:
            known = None
        compared = b"" if known is None else b"if-none-match: %b\r\n" % known.slice.tag.encode("latin-1")
        target = stream_target(reading.name, reading.parameters)
        request = context.request_for(caller, upstream, target, compared)
        try:
            reply = await upstream.pool.ask(request, again=True)
            body = await reply.body(context.limits.edge_frame_bytes)
        except UpstreamLostError:
            upstream.note_failed(context.loop.time())
            raise
        now = context.loop.time()
        self._book.note_reply(reading.name, reply, now)
        if body is None:
            raise TailraceError("unavailable", "the upstream's answer is too large for this edge")
        if reply.status == 304 and known is not None:
            found = known.slice.confirmed(reply, now)
            context.telemetry.edge_revalidated.value += 1
        elif reply.status == 200:
            found = Slice.of(reply, body, now)
        else:
            raise RefusedError(Answer(reply.status, reply.fields, body))
        if self._is_lasting(found):
            context.spawn(self._keep(key, found, facts, generation, caller))
        elif found.is_open and found.tag and facts.generation == generation:
            # If something was written meanwhile it is not given again, but is still good to compare with.
            self._remember(key, Recent(found, generation, writes, now))
        return found

    def _is_lasting(self, found: Slice) -> bool:
        """An answer that never changes. What is private may be kept by who checks every reader."""
        control = found.cache_control
        fits = len(found.body) <= self._context.limits.edge_slice_bytes
        return fits and "immutable" in control and ("public" in control or self._verifies)

    async def _keep(self, key: SliceKey, found: Slice, facts: Facts, generation: int, caller: Caller) -> None:
        """Keeps a slice of a stream that has no end of its own.

        Reads renew a lifetime, and retention moves the start: such streams are read at their owner.
        """
        name = key[0]
        if facts.plain is None:
            await self._confirm(name, caller)
        if not facts.plain or facts.generation != generation or facts.epoch < 0:
            return
        found.epoch = facts.epoch
        keys = {key, (*key[:4], found.start)} if found.start else {key}
        for each in keys:
            self._memory.put(each, found)
            if self._disk is not None:
                self._disk.put(each, found)

    def _remember(self, key: SliceKey, recent: Recent) -> None:
        """Keeps the last answer at the tail; the oldest go when there are too many."""
        self._forget(key)
        self._recent[key] = recent
        self._recent_bytes += recent.slice.size
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._forget(next(iter(self._recent)))

    def _forget(self, key: SliceKey) -> None:
        gone = self._recent.pop(key, None)
        if gone is not None:
            self._recent_bytes -= gone.slice.size


def key_of(reading: Reading) -> SliceKey:
    return (reading.name, reading.filter_text, reading.fmt, reading.key, reading.offset)
