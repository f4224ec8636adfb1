"""One pipeline for the streams of all workers.

Every worker plans and publishes the index files of its own streams. The pipeline only communicates with the
first worker, which merges the plans of all, forwards publications to the owner of their stream, and starts a
pipeline when there is work on any worker. Its token is known to the first worker only, so workers do not
check it among themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.cluster.fork_locations import ForkLocations
from tailrace.cluster.peers import Peers, decode_peer_error
from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.deferred_responses import DeferredResponses
from tailrace.routing.table import RoutingTable
from tailrace.server.pipeline_process import PipelineBacklog
from tailrace.server.pipeline_routes import (
    PIPELINE_PREFIX,
    PLAN_PATH,
    PUBLISH_PATH,
    PipelineRoutes,
    RebuildRequest,
    decode_body,
    decode_publish_request,
    parse_limit,
    parse_live,
)

PART_PREFIX: Final = "/_worker/pipeline/"
PART_PATHS: Final = tuple((PART_PREFIX + name).encode() for name in ("plan", "publish"))
BACKLOG_PATH: Final = "/_worker/demand"
POLL_S: Final = 2.0  # interval of requests for the backlogs of other workers
NAMES_MAX: Final = 65_536
AFTER_ALL: Final = 2**62  # larger than any number of a stream
WORKER_IDENTITY: Final = Identity(sub="worker", scopes=frozenset({"manage", "system"}))
JSON: Final = responses.JSON_TYPE + responses.NO_STORE

PagePosition = tuple[int, int, int]  # the sort key: time of the oldest segment, worker, number of the stream


class PlanPart(msgspec.Struct):
    """A page of one worker's plan."""

    layout: int
    store: str
    streams: list[dict[str, Any]]
    next_after: str | None


class LocalPipeline:
    """Serves the requests of the first worker; on every worker."""

    def __init__(self, routes: PipelineRoutes, table: RoutingTable) -> None:
        self._routes = routes
        self._table = table
        routes.plans.includes_positions = True

    def respond(self, exchange: Exchange) -> None:
        path = PIPELINE_PREFIX + exchange.path[len(PART_PREFIX) :]
        self._table.handler_at(path, exchange.method)(exchange, WORKER_IDENTITY)

    def respond_backlog(self, exchange: Exchange) -> None:
        exchange.respond(200, JSON, msgspec.json.encode(self._routes.state.demand()))


class ClusterPipeline:
    """Serves the pipeline routes for all workers; on the first worker."""

    def __init__(
        self, routes: PipelineRoutes, table: RoutingTable, cluster: Peers, fork_locations: ForkLocations
    ) -> None:
        self._routes = routes
        self._table = table
        self._own = cluster.own
        self._peers = cluster.peers
        self._fork_locations = fork_locations
        self._later = DeferredResponses()
        # Of streams in recent plans, by id.
        self._names: LruCache[str, str] = LruCache(entries_max=NAMES_MAX)
        self._backlogs: dict[int, PipelineBacklog] = {}  # of other workers, as last polled
        self._tasks = TaskSet()

    def start(self) -> None:
        """Poll the backlogs, if a local pipeline is started by the server."""
        if self._routes.state.mode == "auto":
            self._tasks.start(self._poll_backlogs())

    async def stop(self) -> None:
        await self._tasks.close()

    # -- requests ----------------------------------------------------------------------------------------

    def serve(self, exchange: Exchange, identity: Identity) -> None:
        authorise(identity, Action.PIPELINE)
        method, path = exchange.method, exchange.path
        reads, writes = path == PLAN_PATH and method in (b"GET", b"HEAD"), method == b"POST"
        if reads and "stream" not in parse_query(exchange.query):
            self._later.respond(exchange, self._respond_page(exchange))
        elif reads or (writes and path in (PLAN_PATH, PUBLISH_PATH)):
            self._later.respond(exchange, self._forward(exchange, identity))
        else:
            self._table.handler_at(path, method)(exchange, identity)

    async def _forward(self, exchange: Exchange, identity: Identity) -> None:
        """Forward a request about one stream to its owner."""
        owner = await self._fork_locations.find(await self._name(exchange))
        if owner == self._own:
            self._table.handler_at(exchange.path, exchange.method)(exchange, identity)
            return
        method = "POST" if exchange.method == b"POST" else "GET"
        target = (
            PART_PREFIX
            + exchange.path[len(PIPELINE_PREFIX) :].decode()
            + "?"
            + exchange.query.decode("latin-1")
        )
        exchange.respond(*await self._ask(owner, method, target, exchange.body))

    async def _ask(self, worker: int, method: str, target: str, body: bytes) -> tuple[int, bytes, bytes]:
        status, respond = await self._peers[worker].ask(method, target, body)
        return status, JSON, respond

    async def _name(self, exchange: Exchange) -> str:
        if exchange.path == PUBLISH_PATH:
            folder = decode_publish_request(exchange).stream_id
            return self._names.get(folder) or await self._routes.recorded_name(folder)
        if exchange.method == b"POST":
            return decode_body(exchange, RebuildRequest).stream
        return parse_query(exchange.query)["stream"]

    # -- the plan ----------------------------------------------------------------------------------------

    async def _respond_page(self, exchange: Exchange) -> None:
        query = dict(parse_query(exchange.query))
        limit, waits = parse_limit(query.pop("limit", None)), parse_live(query.pop("live", ""))
        begin = page_starts(query.pop("after", ""), self._peers)
        parts = await self._pages(query | {"limit": str(limit)}, begin)
        if waits and not any(part.streams for part in parts.values()):
            await self._wait_for_work(query | {"limit": "1", "live": "long-poll"}, begin)
            parts = await self._pages(query | {"limit": str(limit)}, begin)
        streams, following = merge_plans(parts, limit)
        for one in streams:
            self._names.put(one["stream_id"], one["stream"])
        first = parts[self._own]
        shown = {"layout": first.layout, "store": first.store, "streams": streams, "next_after": following}
        exchange.respond(200, JSON, orjson.dumps(shown))

    async def _pages(self, query: Mapping[str, str], begin: Mapping[int, str]) -> dict[int, PlanPart]:
        """The pages of all workers; fails if one is missing, as there may be work on it."""
        found = await asyncio.gather(*(self._page(worker, query, after) for worker, after in begin.items()))
        return dict(zip(begin, found, strict=True))

    async def _page(self, worker: int, query: Mapping[str, str], after: str) -> PlanPart:
        target = f"{PART_PREFIX}plan?{urlencode({**query, 'after': after})}"
        status, _, body = await self._ask(worker, "GET", target, b"")
        if status != 200:
            raise decode_peer_error(body)
        return msgspec.json.decode(body, type=PlanPart)

    async def _wait_for_work(self, query: Mapping[str, str], begin: Mapping[int, str]) -> None:
        """Return when a worker has work, or the long-polls of all have ended."""
        waiting = {asyncio.create_task(self._page(worker, query, after)) for worker, after in begin.items()}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(one.result().streams for one in done):
                    return
        finally:
            for one in waiting:
                one.cancel()

    # -- backlog -----------------------------------------------------------------------------------------

    def total_backlog(self) -> PipelineBacklog:
        return sum(self._backlogs.values(), self._routes.state.demand())

    async def _poll_backlogs(self) -> None:
        while True:
            for worker, peer in self._peers.items():
                if worker == self._own:
                    continue
                try:
                    _, body = await peer.ask("GET", BACKLOG_PATH)
                    self._backlogs[worker] = msgspec.json.decode(body, type=PipelineBacklog)
                except (TailraceError, msgspec.DecodeError):
                    self._backlogs.pop(worker, None)  # unavailable, so its work cannot be done
            await asyncio.sleep(POLL_S)


def page_starts(after: str, workers: Iterable[int]) -> dict[int, str]:
    """The `after` of each worker for a page after one position of all."""
    if not after:
        return dict.fromkeys(workers, "")
    parts = after.split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts) or len(after) > 64:
        raise TailraceError("invalid_request", "after must be the next_after of a response")
    oldest, number, last = map(int, parts)
    found: dict[int, str] = {}
    for worker in workers:
        if worker == last:
            found[worker] = f"{oldest}.{number}"
        elif worker < last:
            found[worker] = f"{oldest}.{AFTER_ALL}"
        else:
            found[worker] = f"{oldest - 1}.{AFTER_ALL}" if oldest else ""
    return found


def merge_plans(parts: Mapping[int, PlanPart], limit: int) -> tuple[list[dict[str, Any]], str | None]:
    """The streams in order of their oldest segment, and the position after the page."""
    found: list[tuple[PagePosition, dict[str, Any]]] = []
    ends: list[PagePosition] = []  # of pages with a next one: streams after them are not known
    for worker, part in parts.items():
        found += [(_parse_position(stream.pop("place"), worker), stream) for stream in part.streams]
        if part.next_after is not None:
            ends.append(_parse_position(part.next_after, worker))
    found.sort(key=itemgetter(0))
    end = min(ends, default=None)
    if end is not None:
        found = [one for one in found if one[0] <= end]
    if len(found) > limit:
        found = found[:limit]
        end = found[-1][0]
    following = None if end is None else f"{end[0]}.{end[2]}.{end[1]}"
    return [stream for _, stream in found], following


def _parse_position(text: str, worker: int) -> PagePosition:
    oldest, _, number = text.partition(".")
    return int(oldest), worker, int(number)
