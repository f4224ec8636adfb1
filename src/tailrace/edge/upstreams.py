"""The upstreams of an edge: their health, and the placement of streams on them.

Mode `any` has several addresses of one server, mode `sharded` one server behind each.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable

import orjson
import xxhash

from tailrace.common.backoff import Backoff
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet, wait_event
from tailrace.edge.reconnect import BACKOFF_S_MAX, BACKOFF_S_MIN, LoadRamp, OpenLimiter
from tailrace.edge.requests import build_request
from tailrace.edge.upstream_pool import UpstreamAddress, UpstreamPool
from tailrace.http.client import UpstreamLostError

DIFFERENT_SERVERS = "upstreams are different servers: upstream mode any needs one server"
SAME_SERVER = "two upstreams are the same server: upstream mode sharded needs different servers"


def _nothing() -> None:
    """No listener."""


class DeploymentCheck:
    """Detects upstreams whose server does not fit the upstream mode."""

    def __init__(self, mode: str, on_change: Callable[[], None] = _nothing) -> None:
        """`on_change` is called when an upstream was replaced by another server."""
        self._mode = mode
        self._accepted: dict[str, str] = {}  # by upstream id
        self._last: dict[str, str] = {}  # includes rejected ones
        self._on_change = on_change

    def judge(self, upstream_id: str, deployment: str) -> str:
        """Why an upstream cannot be used; empty if it can.

        One that is down keeps its deployment: its replacement must be the same server.
        """
        others = [known for other, known in self._accepted.items() if other != upstream_id]
        if self._mode == "any" and any(known != deployment for known in others):
            self._accepted.pop(upstream_id, None)
            return DIFFERENT_SERVERS
        if self._mode == "sharded" and deployment in others:
            self._accepted.pop(upstream_id, None)
            return SAME_SERVER
        before = self._last.get(upstream_id, deployment)
        self._accepted[upstream_id] = self._last[upstream_id] = deployment
        if before != deployment:
            self._on_change()
        return ""


logger = logging.getLogger("tailrace.edge")

CHECK_S = 2.0
CHECK_ANSWER_S = 1.0
FAILED_CHECKS_MAX = 3
GOOD_CHECKS_MIN = 2
# This many failed connections within this time make an upstream unhealthy, too.
FAILED_CONNECTS_MAX = 5
FAILED_CONNECTS_S = 10.0
READY_BYTES_MAX = 64 * 1024


class Upstream:
    """One upstream: its connections, its health, and the back-off that its lost sockets share."""

    def __init__(
        self,
        origin: UpstreamAddress,
        limits: Limits,
        edge_id: bytes,
        deployments: DeploymentCheck | None = None,
    ) -> None:
        self.origin = origin
        self.id = origin.id
        bounds = (limits.edge_upstream_connections, limits.edge_upstream_queue, limits.edge_answer_ms / 1000)
        self.pool = UpstreamPool(origin, *bounds)
        # For streaming uploads, so that slow clients do not block other requests.
        self.uploads = UpstreamPool(origin, *bounds)
        self.healthy = True  # until a check or request fails
        self.deployment = ""
        self.wrong: str = ""  # why it is not used, healthy or not
        # Loop time since which it is suspect (may be another server), because connections failed.
        self.suspect_since: float | None = None
        self._deployments = DeploymentCheck("single") if deployments is None else deployments
        self._checking: asyncio.Task[None] | None = None
        self._time = time = asyncio.get_running_loop().time
        self.ramp = LoadRamp(time)  # of requests, after it was unhealthy
        self._reopening = LoadRamp(time)  # of lost sockets, after failed openings
        self.opening = OpenLimiter(self._reopening)
        self._edge_id = edge_id
        self._backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, jitter=1.0)
        self._back = asyncio.Event()
        self._bad_checks = 0
        self._good_checks = 0
        self.reached = False  # True after the first good check
        self._lost_at: deque[float] = deque(maxlen=FAILED_CONNECTS_MAX)

    @property
    def pools(self) -> tuple[UpstreamPool, UpstreamPool]:
        return self.pool, self.uploads

    @property
    def usable(self) -> bool:
        return self.healthy and not self.wrong

    async def pause(self) -> None:
        """Back-off before a lost socket is reopened; ends early when the upstream recovers."""
        await wait_event(self._back, self._backoff.upcoming_s())

    def record_opened(self) -> None:
        if self._backoff.failures:
            self._came_back()
            self._start_check()

    async def settle(self) -> None:
        """Checks a suspect upstream; concurrent callers share one check."""
        for _ in range(2):  # the first check may have started before the failure
            if self.suspect_since is not None:
                await asyncio.shield(self._start_check())

    async def check_now(self) -> bool:
        """Whether it is ready, by a check that starts now, or by a good one in progress."""
        is_checking = self._checking is not None and not self._checking.done()
        await asyncio.shield(self._start_check())
        if self.suspect_since is not None and is_checking:
            await asyncio.shield(self._start_check())
        return self.suspect_since is None and not self.wrong

    def _start_check(self) -> asyncio.Task[None]:
        if self._checking is None or self._checking.done():
            self._checking = asyncio.get_running_loop().create_task(self.check())
        return self._checking

    def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        for pool in self.pools:
            pool.close()

    def mark_suspect(self) -> None:
        """Marks it as suspect until the next good check."""
        if self.suspect_since is None:
            self.suspect_since = self._time()

    def _came_back(self) -> None:
        """Wakes the sockets that wait to be reopened."""
        self._backoff.reset()
        self._reopening.begin()
        self._back.set()
        self._back = asyncio.Event()

    def record_failed(self, now: float) -> None:
        """A connection failed."""
        self.mark_suspect()
        self._backoff.failures += 1
        self._lost_at.append(now)
        if len(self._lost_at) == FAILED_CONNECTS_MAX and now - self._lost_at[0] <= FAILED_CONNECTS_S:
            self._set_health(False)

    async def check(self) -> None:
        """One request of `/readyz`."""
        asked_at = self._time()
        ready = await self._ready()
        if ready:
            if self.suspect_since is not None and self.suspect_since <= asked_at:
                self.suspect_since = None
            if self._backoff.failures:
                self._came_back()
            self._bad_checks = 0
            self._good_checks += 1
            if self._good_checks >= GOOD_CHECKS_MIN or not self.reached:
                self.reached = True
                self._lost_at.clear()
                self._set_health(True)
        else:
            self.mark_suspect()
            self._good_checks = 0
            self._bad_checks += 1
            if self._bad_checks >= FAILED_CHECKS_MAX or not self.reached:
                self._set_health(False)

    async def _ready(self) -> bool:
        request = build_request(b"GET", b"/readyz", self.origin.host_header, self._edge_id, None)
        try:
            async with asyncio.timeout(CHECK_ANSWER_S):
                reply, connection = await self.pool.request_dedicated(request)
                try:
                    body = await reply.body(READY_BYTES_MAX)
                finally:
                    connection.abort()
        except (UpstreamLostError, TimeoutError):
            return False
        if reply.status != 200:
            return False
        try:
            self._note_deployment(str(orjson.loads(body or b"")["deployment"]))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            self._note_deployment("")
        return True

    def _note_deployment(self, deployment: str) -> None:
        """Checks the deployment before requests are routed there."""
        wrong = self._deployments.judge(self.id, deployment) if deployment else ""
        if wrong != self.wrong:
            self.wrong = wrong
            if wrong:
                logger.error("upstream rejected", extra=log_fields(upstream=self.id, reason=wrong))
            else:
                logger.warning("upstream accepted again", extra=log_fields(upstream=self.id))
        self.deployment = "" if wrong else deployment

    def _set_health(self, healthy: bool) -> None:
        if healthy is not self.healthy:
            self.healthy = healthy
            if healthy:
                self.ramp.begin()
            event = "upstream is healthy" if healthy else "upstream is unhealthy"
            logger.warning(event, extra=log_fields(upstream=self.id))


class Upstreams:
    """All upstreams, and the placement of streams on them."""

    def __init__(
        self,
        origins: list[UpstreamAddress],
        mode: str,
        limits: Limits,
        edge_id: bytes,
        on_other_server: Callable[[], None] = _nothing,
    ) -> None:
        """`on_other_server` is called when an upstream was replaced by another server."""
        deployments = DeploymentCheck(mode, on_other_server)
        self.all = [Upstream(origin, limits, edge_id, deployments) for origin in origins]
        self.mode = mode
        self._by_id = {upstream.id: upstream for upstream in self.all}
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Checks all upstreams once, then every two seconds."""
        await asyncio.gather(*(upstream.check() for upstream in self.all))
        for upstream in self.all:
            if upstream.wrong:
                raise TailraceError("invalid_request", upstream.wrong)
        self._tasks.start(self._watch())

    async def stop(self) -> None:
        await self._tasks.close()
        for upstream in self.all:
            upstream.close()

    def for_stream(self, name: str) -> Upstream:
        """The upstream for requests of a stream; raises `unavailable`."""
        if len(self.all) == 1:
            return self.all[0]
        key = placement_key(name)
        order = rendezvous_order(key, list(self._by_id))
        if self.mode == "sharded":
            first = self._by_id[order[0]]
            if not first.usable:
                raise TailraceError("unavailable", "the upstream of this stream is unavailable")
            return first
        right = [self._by_id[upstream_id] for upstream_id in order if not self._by_id[upstream_id].wrong]
        # One that never answered, or whose connections just failed, may be another server.
        known = [upstream for upstream in right if upstream.reached] or right
        well = [upstream for upstream in known if upstream.healthy]
        sure = [upstream for upstream in well if upstream.suspect_since is None]
        # A recovered one gets a growing share of its streams.
        ready = (upstream for upstream in sure if upstream.ramp.includes(key))
        found = next(ready, None) or next(iter(sure or well or known), None)
        if found is None:
            raise TailraceError("unavailable", "every upstream was replaced by a different server")
        return found

    def home(self, name: str) -> Upstream:
        """The upstream that cached slices of a stream came from, healthy or not."""
        if self.mode != "sharded" or len(self.all) == 1:
            return self.any()
        return self._by_id[rendezvous_order(placement_key(name), list(self._by_id))[0]]

    def any(self) -> Upstream:
        """An upstream for requests without a stream."""
        right = [upstream for upstream in self.all if not upstream.wrong] or self.all
        return next((upstream for upstream in right if upstream.healthy), right[0])

    @property
    def unhealthy(self) -> list[str]:
        return [upstream.id for upstream in self.all if not upstream.usable]

    @property
    def wrong(self) -> dict[str, str]:
        """Rejected upstreams and the reason."""
        return {upstream.id: upstream.wrong for upstream in self.all if upstream.wrong}

    @property
    def deployment(self) -> str:
        """Identifies the server, or the set of servers, behind this edge."""
        if self.mode != "sharded":
            return self.any().deployment
        joined = " ".join(sorted(upstream.deployment for upstream in self.all))
        return hashlib.sha256(joined.encode()).hexdigest()[:32]

    @property
    def ready(self) -> bool:
        """Whether every stream can be served: sharded mode needs all upstreams, else one is enough."""
        missing = len(self.unhealthy)
        return missing == 0 if self.mode == "sharded" else missing < len(self.all)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.gather(*(upstream.check() for upstream in self.all))


def placement_key(name: str) -> str:
    """The placement key of a stream; partitions of one collection share it."""
    return name.rpartition("/")[0] if name.startswith("__changes__/") else name


def rendezvous_order(key: str, ids: list[str]) -> list[str]:
    """Rendezvous hashing: removing an upstream moves only its own streams."""

    def weight(upstream_id: str) -> int:
        return xxhash.xxh3_64_intdigest(upstream_id.encode() + b"\0" + key.encode())

    return sorted(ids, key=weight, reverse=True)
