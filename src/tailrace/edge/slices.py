"""Reads of slices: from the cache, by joining an equal read in progress, or from upstream."""

from __future__ import annotations

import asyncio

from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import SingleFlight
from tailrace.edge.auth import Caller
from tailrace.edge.cache import RECENT_BYTES_MAX, DiskCache, MemoryCache, RecentRead, Slice
from tailrace.edge.channels import ChannelTable
from tailrace.edge.context import EdgeContext
from tailrace.edge.invalidation import RegistryFollower
from tailrace.edge.requests import SharedRead, build_stream_target
from tailrace.edge.stream_info import StreamInfo, StreamInfoCache
from tailrace.edge.ttl_renewal import TtlRenewals
from tailrace.edge.upstream_feed import UpstreamAnswer, UpstreamRefusedError
from tailrace.edge.upstreams import Upstream
from tailrace.http.client import UpstreamLostError
from tailrace.protocol.http_headers import slice_etag_format

# Errors that concern one client only, not others that share the read.
UNSHARED_STATUSES = (401, 403, 429)

JSON = "json"

SliceKey = tuple[str, str, str, str, str]  # name, filter, format, key, offset


class SliceReader:
    """Serves catch-up reads; authorisation comes before."""

    def __init__(
        self,
        context: EdgeContext,
        book: StreamInfoCache,
        channels: ChannelTable,
        memory: MemoryCache,
        disk: DiskCache | None,
        registry: RegistryFollower,
        renewals: TtlRenewals,
        *,
        verifies: bool,
    ) -> None:
        self._context = context
        self._book = book
        self._channels = channels
        self._memory = memory
        self._disk = disk
        self._registry = registry
        self._renewals = renewals
        self._verifies = verifies
        self._flights: SingleFlight[tuple[SliceKey, int], Slice] = SingleFlight()  # by key and writes
        self._recent: LruCache[SliceKey, RecentRead] = LruCache(  # the last response at the tail
            size_max=RECENT_BYTES_MAX, size_of=lambda _, recent: recent.slice.size
        )
        self._confirming: SingleFlight[str, None] = SingleFlight()

    async def get(self, reading: SharedRead, caller: Caller) -> tuple[Slice, str]:
        """A slice and its X-Cache value. Raises the upstream's error."""
        found = await self.cached(reading, caller)
        return (found, "HIT") if found is not None else (await self.fetched(reading, caller), "MISS")

    async def cached(self, reading: SharedRead, caller: Caller) -> Slice | None:
        """A cached slice that is valid without an upstream request."""
        key = slice_key(reading)
        facts = self._book.get(reading.name)
        found = await self._from_cache(key, facts, caller) or await self._from_recent(key, facts, caller)
        if found is not None:
            self._renewals.note_hit(reading.name, facts, caller.authorization)
        return found

    async def fetched(self, reading: SharedRead, caller: Caller) -> Slice:
        """The slice from upstream, shared with equal concurrent reads."""
        key = slice_key(reading)
        facts = self._book.get(reading.name)
        running = self._flights.get((key, facts.writes))
        if running is not None:
            self._context.telemetry.edge_coalesced.value += 1
            try:
                return await asyncio.shield(running)
            except UpstreamLostError:
                pass  # retried once, unshared
            except UpstreamRefusedError as refused:
                if refused.refusal.status not in UNSHARED_STATUSES:
                    raise
        fetch = self._fetch(key, reading, caller, facts)
        return await asyncio.shield(self._flights.start((key, facts.writes), fetch))

    # -- the cache

    async def _from_cache(self, key: SliceKey, facts: StreamInfo, caller: Caller) -> Slice | None:
        """A cached slice, once the stream is known to exist."""
        asked = key
        key = next(filter(self._may_have, equivalent_keys(asked)), asked)
        if not self._may_have(key):
            return None
        if not self._is_confirmed(facts):
            await self._confirm(key[0], caller)
        if not self._is_confirmed(facts):
            return None
        generation = facts.generation
        upstream = self._context.upstreams.home(key[0])
        await self._settle(upstream, facts)
        if facts.generation != generation:
            return None
        found = self._memory.get(key)
        if found is None and self._disk is not None:
            found = await self._disk.get(key, upstream.deployment, facts.epoch)
            if facts.generation != generation:
                return None
            if found is not None:
                self._memory.put(key, found)
        if found is None or (asked != key and slice_etag_format(found.tag) != JSON):
            return None
        return self._if_good(key, found, facts)

    def _may_have(self, key: SliceKey) -> bool:
        return key in self._memory or (self._disk is not None and self._disk.may_have(key))

    def _if_good(self, key: SliceKey, found: Slice, facts: StreamInfo) -> Slice | None:
        """The slice, unless it expired, was trimmed, or its stream may have ended."""
        now = self._context.loop.time()
        if now >= found.until or found.start < facts.earliest:
            self._memory.discard(key)
            return None
        return found if facts.lives(now) else None

    def _is_confirmed(self, facts: StreamInfo) -> bool:
        """Whether the stream is known to exist, with its lifetime.

        The registry has no trims: those are known from responses of the owner only.
        """
        if facts.lifetime is None:
            return False
        if not facts.lifetime.retained and self._registry.is_complete_since(facts.confirmed_at):
            return True
        age_s = self._context.loop.time() - facts.confirmed_at
        return age_s < self._context.limits.edge_confirm_ms / 1000

    async def _settle(self, upstream: Upstream, facts: StreamInfo) -> None:
        """Checks a suspect upstream: it may have been replaced by another server."""
        if upstream.suspect_since is not None and upstream.suspect_since <= facts.confirmed_at:
            await upstream.settle()

    async def _from_recent(self, key: SliceKey, facts: StreamInfo, caller: Caller) -> Slice | None:
        """A recent response at the tail, if nothing was written since."""
        if self._fresh(key, facts) is None:
            return None
        if facts.lifetime is None:
            await self._confirm(key[0], caller)
        recent = self._fresh(key, facts)
        if recent is None or not facts.lives(self._context.loop.time()):
            return None
        self._context.telemetry.edge_recent_hits.value += 1
        return recent.slice

    def _fresh(self, key: SliceKey, facts: StreamInfo) -> RecentRead | None:
        recent = self._recent.get(key)
        if recent is None or recent.writes != facts.writes or recent.slice.start < facts.earliest:
            return None
        age_s = self._context.loop.time() - recent.at
        return recent if age_s < self._context.limits.edge_recent_ms / 1000 else None

    async def _confirm(self, name: str, caller: Caller) -> None:
        """HEAD of a stream; concurrent callers share one request."""
        await self._confirming.run(name, lambda: self._fetch_head(name, caller.authorization))

    async def _fetch_head(self, name: str, authorization: bytes | None) -> None:
        try:
            await self._channels.head(name, self._context.token or authorization)
        except (UpstreamRefusedError, UpstreamLostError, TailraceError):
            return  # recorded; the read itself reports the error

    # -- reading upstream

    async def _fetch(self, key: SliceKey, reading: SharedRead, caller: Caller, facts: StreamInfo) -> Slice:
        context = self._context
        generation, writes = facts.generation, facts.writes
        upstream = context.upstreams.for_stream(reading.name)
        known = self._recent.get(key)
        if known is not None and known.generation != generation:
            known = None
        compared = b"" if known is None else b"if-none-match: %b\r\n" % known.slice.tag.encode("latin-1")
        target = build_stream_target(reading.name, reading.parameters)
        request = context.request_for(caller, upstream, target, compared)
        sent_at = context.loop.time()
        try:
            reply = await upstream.pool.request(request, again=True)
            body = await reply.body(context.limits.edge_frame_bytes)
        except UpstreamLostError:
            upstream.record_failed(context.loop.time())
            raise
        now = context.loop.time()
        self._book.note_reply(reading.name, reply, sent_at)
        if body is None:
            raise TailraceError("unavailable", "the upstream response is too large for this edge")
        if reply.status == 304 and known is not None:
            found = known.slice.confirmed(reply, now, sent_at)
            context.telemetry.edge_revalidated.value += 1
        elif reply.status == 200:
            found = Slice.from_response(reply, body, now, sent_at)
        else:
            raise UpstreamRefusedError(UpstreamAnswer(reply.status, reply.fields, body))
        facts.note_read(sent_at, generation)
        if self._is_cacheable(found):
            context.tasks.start(self._keep(key, found, facts, generation, caller))
        elif found.is_open and found.tag and facts.generation == generation:
            # After a concurrent write it is not served again, only revalidated.
            self._recent.put(key, RecentRead(found, generation, writes, now))
        return found

    def _is_cacheable(self, found: Slice) -> bool:
        """Whether a response is cacheable. Private ones are, if the edge verifies every reader."""
        fits = len(found.body) <= self._context.limits.edge_slice_bytes
        lasts = self._context.loop.time() < found.until
        return fits and lasts and ("public" in found.cache_control or self._verifies)

    async def _keep(
        self, key: SliceKey, found: Slice, facts: StreamInfo, generation: int, caller: Caller
    ) -> None:
        """Caches a slice once the lifetime of its stream is known; on disk only if immutable."""
        if facts.lifetime is None:
            await self._confirm(key[0], caller)
        upstream = self._context.upstreams.home(key[0])
        await self._settle(upstream, facts)
        if facts.generation != generation or facts.epoch < 0 or self._if_good(key, found, facts) is None:
            return
        found.epoch = facts.epoch
        keys = {key, (*key[:4], found.start)} if found.start else {key}
        if facts.retained:
            keys.discard((*key[:4], "-1"))  # its start moves
        for each in keys:
            self._memory.put(each, found)
            if self._disk is not None and found.is_immutable:
                self._disk.put(each, found, upstream.deployment)


def equivalent_keys(key: SliceKey) -> tuple[SliceKey, ...]:
    """The keys of equal slices: JSON is the default format of a JSON stream."""
    other = {"": JSON, JSON: ""}.get(key[2])
    return (key,) if other is None else (key, (*key[:2], other, *key[3:]))


def slice_key(reading: SharedRead) -> SliceKey:
    return (reading.name, reading.filter_text, reading.fmt, reading.key, reading.offset)
