"""`/v1/pipeline/*`: what is to be built, and the publication of what was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

import msgspec
import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.segment_catalogue import durable_plans
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.request_headers import check_content_encoding
from tailrace.server.details import DetailsRoutes
from tailrace.server.index_status import IndexSnapshot
from tailrace.server.pipeline_child import PipelineProcess
from tailrace.server.pipeline_metrics import CompanionWaitTimer
from tailrace.server.pipeline_plan import JOBS, Json, PipelinePlanner, index_plan_for
from tailrace.server.pipeline_state import FAMILIES, PipelineBacklog, PipelineHeartbeat, PipelineState
from tailrace.storage.index_publication import OBJECTS_MAX, PublicationService
from tailrace.storage.index_work import IndexWork
from tailrace.storage.manifests.model import ManifestError
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStoreError
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.index_files import PublishRequest
from tailrace.storage.segments.model import make_stream_id

PIPELINE_PREFIX: Final = b"/v1/pipeline/"
PLAN_PATH, PUBLISH_PATH, HEARTBEAT_PATH = (
    PIPELINE_PREFIX + b"plan",
    PIPELINE_PREFIX + b"publish",
    PIPELINE_PREFIX + b"heartbeat",
)
BODY_BYTES_MAX: Final = 1024 * 1024
LIMIT_DEFAULT, LIMIT_MAX = 100, 500
WAIT_S: Final = 4.0
T = TypeVar("T")


class PipelineRoutes:
    """The owner plans and publishes; the pipeline computes, wherever it runs."""

    def __init__(self, context: Context, sealing: SealingService, cold: ColdReader) -> None:
        self._context = context
        self._log = context.log
        self._cold = cold
        self.work = IndexWork(context.log, index_plan_for, context.loop)
        self.publishing = PublicationService(context.log, sealing, context.loop)
        self.plans = PipelinePlanner(context, sealing, self.work)
        self.state = PipelineState(context, self.work, self.publishing)
        self.timing = CompanionWaitTimer(context.telemetry)
        self.demand: Callable[[], PipelineBacklog] = self.state.demand
        self.child: PipelineProcess | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False

    def start(self) -> None:
        self._log.open_outbox()
        self.work.on_stale = self._unlist
        self.work.start()
        self.publishing.compacting.start()
        self._log.publisher.on_change.append(self.timing.changed)

    def connect(self, details: DetailsRoutes) -> None:
        """The details of streams tell how far their indexes are."""
        details.indexed_of = self._indexed_of
        details.load_index = self._load_index

    def _indexed_of(self, stream: Stream) -> IndexSnapshot | None:
        found = self.work.known(stream)
        if found is None:
            return None
        plans = durable_plans(stream)
        generation = 0 if plans.wanted is None else plans.wanted.generation
        return IndexSnapshot(found.summary, generation, plans.keyed, self._context.clock.now_ns())

    async def _load_index(self, stream: Stream) -> None:
        found = await self.work.of(stream)
        self.work.summaries.setdefault(stream.number, found)

    def supervise(self, grant: Callable[[float], str] | None, endpoint: Callable[[], str]) -> None:
        """From now on a pipeline of our own is run when there is work."""
        self.child = PipelineProcess(self._context, self.demand, self.state, grant, endpoint)
        self.child.start()

    async def stop_child(self) -> None:
        """End the pipeline of our own; none is started any more."""
        if self.child is not None:
            await self.child.stop()

    async def stop(self) -> None:
        self._ending = True
        await self.stop_child()
        await self.publishing.compacting.stop()
        await self.work.stop()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def answer(self, exchange: Exchange, identity: Identity, method: bytes, path: bytes) -> None:
        authorise(identity, Action.PIPELINE)
        if path == PLAN_PATH:
            if method in (b"GET", b"HEAD"):
                self._spawn(self._guarded(exchange, self._plan(exchange)))
                return
            if method != b"POST":
                raise responses.method_not_allowed("GET, HEAD, POST, OPTIONS")
            self._spawn(self._guarded(exchange, self._rebuild(decode_body(exchange, RebuildRequest))))
            return
        if path not in (PUBLISH_PATH, HEARTBEAT_PATH):
            raise TailraceError("not_found", "there is nothing at this path")
        if method != b"POST":
            raise responses.method_not_allowed("POST, OPTIONS")
        if path == PUBLISH_PATH:
            self._spawn(self._guarded(exchange, self._publish(decode_publish_request(exchange))))
            return
        beat = decode_body(exchange, PipelineHeartbeat)
        if beat.drain:
            self.state.draining = self.state.fresh or self.state.state != "off"
            body: Json = {"draining": self.state.draining}
        else:
            body = self.state.take(beat)
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._context.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, exchange: Exchange, work: Coroutine[None, None, Json]) -> None:
        try:
            body = await work
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
        except Exception:
            responses.respond_error(exchange, TailraceError("internal", "the request failed"))
            raise
        else:
            exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    # -- plan ------------------------------------------------------------------------------------------

    async def _plan(self, exchange: Exchange) -> Json:
        query = parse_query(exchange.query)
        jobs = _parse_jobs(query.get("jobs", ""))
        waits = parse_live(query.get("live", ""))
        if "stream" in query:
            return await self.plans.of_stream(query["stream"], jobs)
        limit = parse_limit(query.get("limit"))
        after = query.get("after", "")
        loop = self._context.loop
        until = loop.time() + (WAIT_S if waits else 0.0)
        while True:
            body = await self.plans.page(after, limit, jobs)
            left_s = until - loop.time()
            if body["streams"] or left_s <= 0 or self._ending or exchange.answered:
                return body
            await self.work.change(left_s)

    # -- publish ---------------------------------------------------------------------------------------

    async def _publish(self, offer: PublishRequest) -> Json:
        stream = await self.find(offer.stream_id)
        outcome = await self.publishing.publish(stream, offer)
        return {"result": outcome.result, "manifest_generation": outcome.generation}

    async def find(self, folder: str) -> Stream:
        """The stream with an id. One that was not offered lately is found by its manifest."""
        name = self.plans.names.get(folder)
        if name is None:
            name = await self.recorded_name(folder)
        stream = self._log.find(name)
        if stream is None or stream.gone or make_stream_id(stream.name, stream.incarnation) != folder:
            raise TailraceError("stream_gone", "the stream with this id was deleted")
        return stream

    async def recorded_name(self, folder: str) -> str:
        """Whose manifest it is."""
        if len(folder) != 32 or not all(digit in "0123456789abcdef" for digit in folder):
            raise TailraceError("invalid_request", "stream_id must be 32 hex digits")
        try:
            stored = await ManifestStore(await self._cold.parts.opened(), 0).load(folder)
        except (ObjectStoreError, ManifestError) as error:
            raise TailraceError("unavailable", f"the manifest cannot be read: {error}") from error
        if stored is None:
            raise TailraceError("not_found", "there is no stream with this id")
        return stored.head.name

    async def _rebuild(self, asked: RebuildRequest) -> Json:
        """Companions are taken out, so that they are built again; queries scan meanwhile."""
        stream = self._log.readable(asked.stream)
        known = await self._log.catalogue.of(stream)
        if asked.family is not None and asked.family not in FAMILIES:
            raise TailraceError("invalid_request", f"there are the families {', '.join(FAMILIES)}")
        keys = [one.object for one in known.companions if asked.family in (None, one.family)]
        keys += [one.object for one in known.quarantined]
        await self.publishing.unlist(stream, tuple(keys))
        return {"stream": stream.name, "scheduled": len(keys)}

    # -- what older plans left ---------------------------------------------------------------------------

    def _unlist(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self._spawn(self._unlisted(stream, keys))

    async def _unlisted(self, stream: Stream, keys: tuple[str, ...]) -> None:
        try:
            await self.publishing.unlist(stream, keys)
        except TailraceError:
            pass  # the next look at the stream finds them again


class RebuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for companions to be built again: of one family, or of all."""

    stream: str
    family: str | None = None


def decode_body(exchange: Exchange, kind: type[T]) -> T:
    check_content_encoding(exchange)
    if len(exchange.body) > BODY_BYTES_MAX:
        raise TailraceError("payload_too_large", f"a body has at most {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(exchange.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TailraceError("invalid_request", f"the body cannot be understood: {error}") from None


def decode_publish_request(exchange: Exchange) -> PublishRequest:
    offer = decode_body(exchange, PublishRequest)
    if max(len(offer.add), len(offer.inputs), len(offer.replace), len(offer.quarantine)) > OBJECTS_MAX:
        raise TailraceError("invalid_request", f"a publication has at most {OBJECTS_MAX} objects of a kind")
    return offer


def _parse_jobs(text: str) -> tuple[str, ...]:
    if text in ("", "all"):
        return JOBS
    found = tuple(text.split(","))
    for job in found:
        if job not in JOBS:
            raise TailraceError("invalid_request", f"jobs must be some of {', '.join(JOBS)}, or all")
    return found


def parse_live(text: str) -> bool:
    if text not in ("", "false", "long-poll"):
        raise TailraceError("invalid_request", "live must be long-poll")
    return text == "long-poll"


def parse_limit(text: str | None) -> int:
    if text is None:
        return LIMIT_DEFAULT
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= limit <= LIMIT_MAX:
        raise TailraceError("invalid_request", f"limit must be 1 to {LIMIT_MAX}")
    return limit
