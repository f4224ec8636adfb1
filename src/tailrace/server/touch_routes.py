"""Routes touch/meta, touch/templates/activate and touch/wait, and the feed that derives touches from entries.

A `TouchFeed` follows its stream from the first request on: it reads new entries in order, in short steps, and
derives older touches again for a client whose cursor is older than the journal of touches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

import orjson

from tailrace.auth import Action, Identity, invalid_token_error
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    COUNT_TEXT,
    OFFSET,
    STRING,
    Component,
    Json,
    answer,
    array,
    closed,
    counts,
    obj,
    query,
    request,
)
from tailrace.routing.table import Route, route_group
from tailrace.schema.append_validation import PROFILE_DOCUMENT
from tailrace.schema.json_values import UnusableRecordError, decode_json_record
from tailrace.schema.profiles.profile import StateProtocolProfile, read_profile
from tailrace.schema.profiles.state_protocol import TouchConfig
from tailrace.schema.profiles.touch_keys import JournalLayer
from tailrace.schema.profiles.touch_state import StaleCursor, TouchState
from tailrace.schema.profiles.touch_templates import parse_ttl
from tailrace.schema.profiles.touch_waits import TIMEOUT_MS, TIMEOUT_MS_MAX, Waiter, WaitRequest, parse_wait
from tailrace.schema.routes import TOUCH_DOCUMENT, parse_json_body

STEP_ENTRIES = 500
STEP_BYTES = 256 * 1024
RETRY_S = 1.0
CURSOR_TOO_OLD = "cursor is too old; rerun/re-subscribe and start from cursor"

logger = logging.getLogger("tailrace.touch")


class TouchFeed:
    """Derives the touches of one stream until it is closed."""

    def __init__(
        self, context: Context, stream: Stream, state: TouchState, on_ended: Callable[[TouchFeed], None]
    ) -> None:
        self._context = context
        self._reader = context.log.reader
        self.stream = stream
        self.state = state
        self.closed = False
        self._on_ended = on_ended
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._past: asyncio.Task[None] | None = None
        stream.add_reader(self)

    def on_published(self, stream: Stream) -> None:
        """Read new entries together, once per coalescing window."""
        if stream.removed or stream.gone:
            if stream.batch is None:  # with a batch it is not durable yet, and this is called again
                self._on_ended(self)
        elif self._timer is None and self._task is None and self.behind:
            window_s = self.state.config.touch_coalesce_window_ms / 1000
            self._timer = self._context.loop.call_later(window_s, self._start)

    @property
    def behind(self) -> bool:
        return not self.closed and self.state.journal.absorbed < self.stream.visible

    def close(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._task, self._past):
            if task is not None:
                task.cancel()
        self.stream.remove_reader(self)

    async def catch_up(self) -> None:
        """Read all visible entries, and wake the waits that they touch."""
        while self.behind:
            self._start()
            assert self._task is not None
            await asyncio.shield(self._task)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None and not self.closed:
            self._task = self._context.loop.create_task(self._absorb())
            self._task.add_done_callback(self._absorbed)

    def _absorbed(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "cannot read entries for touches, retrying",
                extra=log_fields(stream=self.stream.name, error=str(error)),
            )
            if not self.closed:
                self._timer = self._context.loop.call_later(RETRY_S, self._start)
            return
        self.on_published(self.stream)

    async def _absorb(self) -> None:
        state, stream = self.state, self.stream
        while self.behind:
            after = state.journal.absorbed
            if after < stream.earliest:
                state.skip_to(stream.visible)
                state.flush()
                return
            page = await self._reader.read(stream, after, STEP_BYTES, STEP_ENTRIES, apart=True)
            state.budget.begin_batch(stream.visible - after)
            for entry, part in zip(page.entries(), page.parts, strict=True):
                state.apply(entry - 1, _load_record(part))
            state.flush()
            await asyncio.sleep(0)

    async def derive_past(self, cursor: int) -> None:
        """Derive touches again from the cursor on, once for all waits that need them."""
        while cursor < self.state.journal.floor:
            floor = self.state.journal.floor
            if floor - cursor > self._context.limits.touch_replay_max or cursor < self.stream.earliest:
                raise StaleCursor(CURSOR_TOO_OLD)
            if self._past is None:
                self._past = self._context.loop.create_task(self._derive(cursor, floor))
                self._past.add_done_callback(self._derived)
            await asyncio.shield(self._past)

    def _derived(self, task: asyncio.Task[None]) -> None:
        self._past = None
        if not task.cancelled():
            task.exception()  # mark as retrieved: all waiters may have disconnected

    async def _derive(self, cursor: int, floor: int) -> None:
        past = JournalLayer(cursor)
        keys_max = self.state.config.memory.pending_max_keys
        after = cursor
        while after < floor:
            try:
                page = await self._reader.read(
                    self.stream, after, STEP_BYTES, min(STEP_ENTRIES, floor - after), apart=True
                )
            except TailraceError:
                raise StaleCursor(CURSOR_TOO_OLD) from None
            for entry, part in zip(page.entries(), page.parts, strict=True):
                self.state.derive(past, entry - 1, _load_record(part))
            if len(past.keys) > keys_max:
                raise StaleCursor(CURSOR_TOO_OLD)
            after = page.next_entry
            await asyncio.sleep(0)
        self.state.journal.extend_back(past, floor)
        if self.state.journal.floor > cursor:
            raise StaleCursor(CURSOR_TOO_OLD)  # the journal has moved on in the meantime


def _load_record(part: bytes | memoryview) -> object:
    try:
        return decode_json_record(part)
    except UnusableRecordError:
        return None  # older than the profile: not a change record


FEEDS_MAX = 1000  # cursors stay valid when their feed is evicted
SWEEP_S = 0.05
SERVER_STOPPING = TailraceError("unavailable", "the server is stopping")


class TouchRoutes:
    """Serves the touch routes; a wait takes up to two minutes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        self._feeds: dict[int, TouchFeed] = {}
        self._tasks: dict[asyncio.Task[None], Exchange] = {}
        self._callers: dict[Exchange, Identity] = {}  # of open waits
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._gc_timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._past_wakeups = self._past_stales = 0  # of closed feeds

    def meta(self, exchange: Exchange, _: Identity, name: str) -> None:
        self._meta(exchange, self._open_feed(name))

    def activate(self, exchange: Exchange, _: Identity, name: str) -> None:
        feed = self._open_feed(name)
        self._activate(exchange, feed, parse_json_body(exchange.body))

    def wait(self, exchange: Exchange, identity: Identity, name: str) -> None:
        feed = self._open_feed(name)
        self._wait(exchange, identity, feed, parse_wait(parse_json_body(exchange.body)))

    def _open_feed(self, name: str) -> TouchFeed:
        if self._stopping:
            raise SERVER_STOPPING
        return self._feed(self._log.readable(name))

    @property
    def waiters(self) -> int:
        return sum(len(feed.state.waiters.all) for feed in self._feeds.values())

    @property
    def wakeups(self) -> int:
        return self._past_wakeups + sum(feed.state.wakeups for feed in self._feeds.values())

    @property
    def stales(self) -> int:
        return self._past_stales + sum(feed.state.stales for feed in self._feeds.values())

    def journals(self) -> list[tuple[int, str]]:
        """Bytes of the touch journals, by stream."""
        feeds = self._feeds.values()
        return [(feed.state.journal.memory_bytes, feed.stream.name) for feed in feeds]

    def reset(self, stream: Stream) -> None:
        """The profile has changed: wake all waits, and their clients retry."""
        feed = self._feeds.pop(stream.number, None)
        if feed is not None:
            feed.state.wake_everyone()
            self._close(feed)

    def _close(self, feed: TouchFeed) -> None:
        feed.close()
        self._past_wakeups += feed.state.wakeups
        self._past_stales += feed.state.stales

    def end_all(self) -> None:
        """Shutdown."""
        self._stopping = True
        for task, exchange in tuple(self._tasks.items()):
            task.cancel()
            responses.respond_error(exchange, SERVER_STOPPING)
        for feed in self._feeds.values():
            feed.close()
            for waiter in tuple(feed.state.waiters.all):
                feed.state.waiters.remove(waiter)
                waiter.refuse(SERVER_STOPPING)
        self._feeds.clear()
        for timer in (self._sweep_timer, self._gc_timer):
            if timer is not None:
                timer.cancel()

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        """End waits whose credentials are no longer valid, and return how many."""
        lost = [exchange for exchange, identity in self._callers.items() if not is_valid(identity)]
        for exchange in lost:
            leave = exchange.on_gone
            if leave is not None:
                leave()
            responses.respond_error(exchange, invalid_token_error("the token was revoked"))
        return len(lost)

    # -- feeds -----------------------------------------------------------------------------------------

    def _feed(self, stream: Stream) -> TouchFeed:
        documents = stream.visible_documents or {}
        document = documents.get(TOUCH_DOCUMENT)
        profile = read_profile(documents.get(PROFILE_DOCUMENT))
        if document is None or not isinstance(profile, StateProtocolProfile):
            raise TailraceError("not_found", "touch not enabled")
        feed = self._feeds.pop(stream.number, None)
        if feed is None or feed.stream is not stream:
            if feed is not None:
                self._close(feed)
            identity = f"{stream.name}\0{stream.incarnation}\0{stream.epoch}"
            config = profile.touch or TouchConfig()
            state = TouchState.load(config, document, identity, self._context.clock, stream.visible)
            feed = TouchFeed(self._context, stream, state, self._end_feed)
        self._feeds[stream.number] = feed  # most recently used last
        if len(self._feeds) > FEEDS_MAX:
            self._drop_one()
        if self._gc_timer is None:
            self._collect_templates()
        return feed

    def _drop_one(self) -> None:
        for number, feed in self._feeds.items():
            if not feed.state.waiters.all:
                self._close(feed)
                del self._feeds[number]
                return

    def _save(self, feed: TouchFeed, exchange: Exchange | None = None, body: bytes = b"") -> None:
        """Store the templates; the response to `exchange` waits until they are durable."""
        if not feed.state.is_of((feed.stream.documents or {}).get(TOUCH_DOCUMENT)):
            raise TailraceError("not_found", "touch not enabled")

        def saved(_: Transaction, error: TailraceError | None) -> None:
            if exchange is None:
                return
            if error is not None:
                responses.respond_error(exchange, error)
            else:
                exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, body)

        self._log.describe(feed.stream, TOUCH_DOCUMENT, feed.state.to_document(), saved)

    def _collect_templates(self) -> None:
        """Retire unused templates, and store from time to time when the others were last used."""
        next_ms = 60_000
        for feed in self._feeds.values():
            next_ms = min(next_ms, feed.state.config.templates.gc_interval_ms)
            if feed.state.expire_templates():
                try:
                    self._save(feed)
                except TailraceError:
                    feed.state.templates.seen = True  # retry at the next round
        self._gc_timer = None
        if self._feeds:
            self._gc_timer = self._context.loop.call_later(next_ms / 1000, self._collect_templates)

    def _end_feed(self, feed: TouchFeed) -> None:
        """The stream was deleted."""
        if self._feeds.pop(feed.stream.number, None) is not None:
            self._close(feed)
        refusal = TailraceError("not_found", f"stream {feed.stream.name!r} not found")
        for waiter in tuple(feed.state.waiters.all):
            feed.state.waiters.remove(waiter)
            waiter.refuse(refusal)

    # -- routes ----------------------------------------------------------------------------------------

    def _meta(self, exchange: Exchange, feed: TouchFeed) -> None:
        query = parse_query(exchange.query)
        catch_up = query.get("settle", "")
        if catch_up not in ("", "flush"):
            raise TailraceError("invalid_request", "settle must be flush")
        text = query.get("timeoutMs", str(TIMEOUT_MS))
        if not text.isdecimal() or not text.isascii() or len(text) > 6 or int(text) > TIMEOUT_MS_MAX:
            raise TailraceError("invalid_request", f"timeoutMs must be an integer from 0 to {TIMEOUT_MS_MAX}")
        if catch_up:
            self._run(exchange, self._settled_meta(exchange, feed, int(text)))
        else:
            _respond_meta(exchange, feed)

    async def _settled_meta(self, exchange: Exchange, feed: TouchFeed, timeout_ms: int) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await feed.catch_up()
        except TimeoutError:
            pass
        _respond_meta(exchange, feed)

    def _activate(self, exchange: Exchange, feed: TouchFeed, body: object) -> None:
        self._run(exchange, self._activated(exchange, feed, body))

    async def _activated(self, exchange: Exchange, feed: TouchFeed, body: object) -> None:
        body, changed = feed.state.activate(body)
        if changed:
            await self._log.backpressure_queue.submit(partial(self._save, feed, exchange, orjson.dumps(body)))
        else:
            exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    def _wait(self, exchange: Exchange, identity: Identity, feed: TouchFeed, request: WaitRequest) -> None:
        if self.waiters + len(self._tasks) >= self._context.limits.touch_max_waiters:
            limit = self._context.limits.touch_max_waiters
            raise TailraceError("overloaded", f"the limit of {limit} touch waits is reached")
        parse_ttl(request.body, feed.state.config.templates, "wait")
        self._callers[exchange] = identity
        self._run(exchange, self._begin_wait(exchange, feed, request))

    async def _begin_wait(self, exchange: Exchange, feed: TouchFeed, request: WaitRequest) -> None:
        if exchange.answered:
            return  # the token was revoked before the wait began
        state, stream = feed.state, feed.stream
        head = stream.visible
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            self._callers.pop(exchange, None)
            if waiter is not None:
                state.waiters.remove(waiter)

        def respond(body: dict[str, object]) -> None:
            self._callers.pop(exchange, None)
            _respond_json(exchange, body)

        def refuse(refusal: TailraceError) -> None:
            self._callers.pop(exchange, None)
            responses.respond_error(exchange, refusal)

        waiter: Waiter | None = None
        exchange.on_gone = leave
        declared = list(request.declared)
        if declared:
            ttl_ms = parse_ttl(request.body, state.config.templates, "wait")
            if state.declare(declared, ttl_ms)[2]:
                await self._log.backpressure_queue.submit(partial(self._save, feed))
        try:
            cursor = state.cursor_of(request, head)
            if cursor < state.journal.floor:
                await feed.derive_past(cursor)
            if head - state.journal.absorbed <= state.config.lag_degrade_fine_touches_at_source_offsets:
                await feed.catch_up()
            waiter = state.begin(request, cursor, respond)
        except StaleCursor as stale:
            if stale.delayed:
                await asyncio.sleep(state.config.touch_coalesce_window_ms / 1000)
            _respond_json(exchange, state.stale(request, stale.message, max(head, stream.visible)))
            return
        if waiter is None:
            return
        waiter.refuse = refuse
        if left:
            state.waiters.remove(waiter)
        elif feed.closed:
            state.wake_everyone()
        elif self._sweep_timer is None:
            self._sweep_timer = self._context.loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        for feed in self._feeds.values():
            feed.state.expire()
        if self.waiters:
            self._sweep_timer = self._context.loop.call_later(SWEEP_S, self._sweep)

    def _run(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        task = self._context.loop.create_task(self._respond(exchange, work))
        self._tasks[task] = exchange
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _respond(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
        except asyncio.CancelledError:
            responses.respond_error(exchange, SERVER_STOPPING)
            raise
        except Exception:
            responses.respond_error(exchange, TailraceError("internal", "request failed"))
            raise
        finally:
            if exchange.answered:
                self._callers.pop(exchange, None)


def _respond_meta(exchange: Exchange, feed: TouchFeed) -> None:
    head = feed.stream.visible
    through = feed.stream.offset(feed.state.journal.absorbed)
    _respond_json(exchange, feed.state.meta(head, through))


def _respond_json(exchange: Exchange, body: dict[str, object]) -> None:
    exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))


# Requests are parsed by the profile, with errors of their own.
_CURSOR: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{16}:[0-9]{1,18}$"}
_TEMPLATE_ID: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_TIMEOUT_MS: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 120_000, "default": 30_000}
_TTL_MS: Final[Json] = {"type": "integer", "minimum": 1, "maximum": 30 * 86_400_000}
_KIND: Final[Json] = {"enum": ["fineKey", "tableKey", "templateKey"]}
_BUCKET: Final[dict[str, Json]] = {
    "bucketMaxSourceOffsetSeq": COUNT_TEXT,
    **counts("flushAtMs", "bucketStartMs"),
}

_TEMPLATES: Final[Json] = array(
    closed(
        {
            "entity": STRING,
            "fields": array(
                closed({"name": STRING}, {"encoding": {"type": "string", "default": "string"}}), maxItems=64
            ),
        }
    ),
    maxItems=256,
)
_TOUCH_META: Final = Component(
    "TouchMeta",
    obj(
        {
            "mode": {"const": "memory"},
            "cursor": _CURSOR,
            "epoch": STRING,
            **counts(
                "generation", "bucketMs", "coalesceMs", "filterSize", "k", "pendingKeys", "overflowBuckets"
            ),
            **counts("activeWaiters", "lastFlushAtMs", "activeTemplates", "lagSourceOffsets"),
            "bucketMaxSourceOffsetSeq": COUNT_TEXT,
            "settled": BOOLEAN,
            "touchMode": {"enum": ["idle", "fine", "restricted", "coarseOnly"]},
            "walScannedThrough": OFFSET,
        }
    ),
)
_TOUCH_TEMPLATES: Final = Component(
    "TouchTemplates", closed({"templates": _TEMPLATES}, {"inactivityTtlMs": _TTL_MS})
)
_ACTIVATION: Final = Component(
    "TouchActivation",
    obj(
        {
            "activated": array(
                obj(
                    {
                        "templateId": _TEMPLATE_ID,
                        "state": {"const": "active"},
                        "activeFromTouchOffset": _CURSOR,
                    }
                )
            ),
            "denied": array(obj({"templateId": _TEMPLATE_ID, "reason": STRING})),
            "limits": obj(counts("maxActiveTemplatesPerStream", "maxActiveTemplatesPerEntity")),
        }
    ),
)
_TOUCH_WAIT: Final = Component(
    "TouchWait",
    closed(
        {"cursor": {"anyOf": [{"const": "now"}, _CURSOR]}},
        {
            "keys": array({"type": "string", "minLength": 1, "maxLength": 1024}, maxItems=1024),
            "keyIds": array({"type": "integer", "minimum": 0, "maximum": 2**32 - 1}, maxItems=1024),
            "timeoutMs": _TIMEOUT_MS,
            "interestMode": {"enum": ["fine", "coarse"], "default": "fine"},
            "exact": BOOLEAN,
            "templateIdsUsed": array(_TEMPLATE_ID, maxItems=1024),
            "declareTemplates": _TEMPLATES,
            "inactivityTtlMs": _TTL_MS,
        },
        description="At least one of `keys` and `keyIds`.",
    ),
)
_TOUCHED: Final = Component(
    "Touched", obj({"touched": BOOLEAN, "cursor": _CURSOR, "effectiveWaitKind": _KIND, **_BUCKET})
)
_TOUCH_STALE: Final = Component(
    "TouchStale",
    obj(
        {
            "stale": {"const": True},
            "cursor": _CURSOR,
            "epoch": STRING,
            "generation": COUNT,
            "effectiveWaitKind": _KIND,
            **_BUCKET,
            "error": obj({"code": {"const": "stale"}, "message": STRING}),
        }
    ),
)
_TOUCH: Final = "/v1/stream/{name}/touch"
ROUTES: Final = route_group(
    "touch",
    Route(
        *("GET", f"{_TOUCH}/meta", Action.TOUCH_STREAM, TouchRoutes.meta, "readTouchMeta"),
        "State of touches, and a cursor to start with",
        {200: answer("The current state.", _TOUCH_META)},
        errors=(404, 410),
        parameters=[
            query("settle", "`flush` first processes all appended entries.", {"enum": ["flush", ""]}),
            query("timeoutMs", "Timeout of the flush.", _TIMEOUT_MS),
        ],
    ),
    Route(
        *("POST", f"{_TOUCH}/templates/activate", Action.TOUCH_STREAM, TouchRoutes.activate),
        "activateTouchTemplates",
        "Activate templates: sets of fields whose changes are reported",
        {200: answer("Active and denied templates.", _ACTIVATION)},
        errors=(404, 409, 410, 507),
        body=request(
            _TOUCH_TEMPLATES,
            {"templates": [{"entity": "orders", "fields": [{"name": "customer", "encoding": "string"}]}]},
            "The templates.",
        ),
    ),
    Route(
        *("POST", f"{_TOUCH}/wait", Action.TOUCH_STREAM, TouchRoutes.wait, "waitForTouch"),
        "Wait until one of the keys is touched",
        {
            200: answer(
                "Touched, not touched before the timeout, or stale (the cursor is too old).",
                {"anyOf": [_TOUCHED, _TOUCH_STALE]},
            )
        },
        errors=(404, 409, 410, 507),
        body=request(
            _TOUCH_WAIT,
            {"cursor": "now", "keys": ["00d5a1c0ffee0001"], "timeoutMs": 1000},
            "The keys to wait for.",
        ),
    ),
    place="owner",
)
