"""The upstreams of an edge: which one a stream is asked of, and which of them are well."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque

import orjson
import xxhash

from tailrace.edge.connection import UpstreamLostError
from tailrace.edge.headers import own_request
from tailrace.edge.origin import Origin
from tailrace.edge.pool import Pool
from tailrace.edge.ramp import Opening, Ramp
from tailrace.errors import TailraceError
from tailrace.limits import Limits

logger = logging.getLogger("tailrace.edge")

CHECK_S = 2.0
CHECK_ANSWER_S = 1.0
FAILED_CHECKS_MAX = 3
GOOD_CHECKS_MIN = 2
# So many connections that fail within this time take an upstream out, too.
FAILED_CONNECTS_MAX = 5
FAILED_CONNECTS_S = 10.0
# A lost socket is opened again after so long, doubling with each failure, all of it random.
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 10.0
READY_BYTES_MAX = 64 * 1024


class Upstream:
    """One door: its connections, its health, and the pause that all its lost sockets share."""

    def __init__(self, origin: Origin, limits: Limits, edge_id: bytes) -> None:
        self.origin = origin
        self.id = origin.id
        bounds = (limits.edge_upstream_connections, limits.edge_upstream_queue, limits.edge_answer_ms / 1000)
        self.pool = Pool(origin, *bounds)
        # For requests that are still coming: a client that sends slowly takes nobody else's turn.
        self.uploads = Pool(origin, *bounds)
        self.healthy = True  # until proven otherwise: the first request finds out
        self.deployment = ""
        time = asyncio.get_running_loop().time
        self.ramp = Ramp(time)  # of requests, after it was out
        self._reopening = Ramp(time)  # of lost sockets, after they could not be opened
        self.opening = Opening(self._reopening)
        self._edge_id = edge_id
        self._failures = 0
        self._back = asyncio.Event()
        self._bad_checks = 0
        self._good_checks = 0
        self._reached = False  # nobody is given the benefit of the doubt before the first good look
        self._lost_at: deque[float] = deque(maxlen=FAILED_CONNECTS_MAX)

    async def pause(self) -> None:
        """Waits before a lost socket is opened again; shorter if the upstream is seen to be back."""
        most = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2**self._failures)
        try:
            async with asyncio.timeout(random.uniform(0, most)):  # noqa: S311 - spreads load
                await self._back.wait()
        except TimeoutError:
            return

    def note_opened(self) -> None:
        if self._failures:
            self._came_back()

    def _came_back(self) -> None:
        """Those who wait for it may try, in their turn."""
        self._failures = 0
        self._reopening.begin()
        self._back.set()
        self._back = asyncio.Event()

    def note_failed(self, now: float) -> None:
        """A connection could not be made or broke."""
        self._failures = min(self._failures + 1, 10)
        self._lost_at.append(now)
        if len(self._lost_at) == FAILED_CONNECTS_MAX and now - self._lost_at[0] <= FAILED_CONNECTS_S:
            self._set_health(False)

    async def check(self) -> None:
        """One look at `/readyz`."""
        ready = await self._ready()
        if ready:
            if self._failures:
                self._came_back()
            self._bad_checks = 0
            self._good_checks += 1
            if self._good_checks >= GOOD_CHECKS_MIN or not self._reached:
                self._reached = True
                self._lost_at.clear()
                self._set_health(True)
        else:
            self._good_checks = 0
            self._bad_checks += 1
            if self._bad_checks >= FAILED_CHECKS_MAX or not self._reached:
                self._set_health(False)

    async def _ready(self) -> bool:
        request = own_request(b"GET", b"/readyz", self.origin.host_header, self._edge_id, None)
        try:
            async with asyncio.timeout(CHECK_ANSWER_S):
                reply, connection = await self.pool.ask_apart(request)
                try:
                    body = await reply.body(READY_BYTES_MAX)
                finally:
                    connection.abort()
        except (UpstreamLostError, TimeoutError):
            return False
        if reply.status != 200:
            return False
        try:
            self.deployment = str(orjson.loads(body or b"")["deployment"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            self.deployment = ""
        return True

    def _set_health(self, healthy: bool) -> None:
        if healthy is not self.healthy:
            self.healthy = healthy
            if healthy:
                self.ramp.begin()
            logger.warning("upstream %s is %s", self.id, "back" if healthy else "out")


class Upstreams:
    """All doors, and the order in which a stream tries them."""

    def __init__(self, origins: list[Origin], mode: str, limits: Limits, edge_id: bytes) -> None:
        self.all = [Upstream(origin, limits, edge_id) for origin in origins]
        self.mode = mode
        self._by_id = {upstream.id: upstream for upstream in self.all}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """A first look at all of them, then one every two seconds."""
        await asyncio.gather(*(upstream.check() for upstream in self.all))
        self._compare()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for upstream in self.all:
            upstream.pool.close()
            upstream.uploads.close()

    def of(self, name: str) -> Upstream:
        """The upstream that a stream is asked of, or `unavailable`."""
        if len(self.all) == 1:
            return self.all[0]
        key = placement(name)
        order = ranked(key, list(self._by_id))
        if self.mode == "sharded":
            first = self._by_id[order[0]]
            if not first.healthy:
                raise TailraceError("unavailable", "the server of this stream does not answer")
            return first
        well = [self._by_id[upstream_id] for upstream_id in order if self._by_id[upstream_id].healthy]
        # One that has just come back is given a few of its streams, then more of them.
        ready = (upstream for upstream in well if upstream.ramp.takes(key))
        return next(ready, well[0] if well else self._by_id[order[0]])

    def any(self) -> Upstream:
        """For requests that belong to no stream."""
        return next((upstream for upstream in self.all if upstream.healthy), self.all[0])

    @property
    def unhealthy(self) -> list[str]:
        return [upstream.id for upstream in self.all if not upstream.healthy]

    @property
    def ready(self) -> bool:
        """Whether every stream can be served: one door is enough unless each has streams of its own."""
        missing = len(self.unhealthy)
        return missing == 0 if self.mode == "sharded" else missing < len(self.all)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.gather(*(upstream.check() for upstream in self.all))
            try:
                self._compare()
            except TailraceError as error:
                logger.error("%s", error.message)

    def _compare(self) -> None:
        """One deployment behind all doors, or one behind each: anything else would split streams."""
        if len(self.all) == 1:
            return
        known = [upstream.deployment for upstream in self.all if upstream.deployment]
        if self.mode == "any" and len(set(known)) > 1:
            raise TailraceError("invalid_request", "the upstreams are different servers: mode any is for one")
        if self.mode == "sharded" and len(set(known)) < len(known):
            raise TailraceError(
                "invalid_request", "two upstreams are one server: mode sharded is for several"
            )


def placement(name: str) -> str:
    """What a stream is placed by: all partitions of one collection go together."""
    return name.rpartition("/")[0] if name.startswith("__changes__/") else name


def ranked(key: str, ids: list[str]) -> list[str]:
    """Rendezvous hashing: taking one upstream away moves only the streams that it had."""

    def weight(upstream_id: str) -> int:
        return xxhash.xxh3_64_intdigest(upstream_id.encode() + b"\0" + key.encode())

    return sorted(ids, key=weight, reverse=True)
