"""Routes of subscriptions, `/v1/stream/__ds/...`: authorization, requests, responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.protocol import offsets, stream_names
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.subscriptions import keys, ssrf, views
from tailrace.subscriptions.model import (
    STREAMS_MAX,
    SubscriptionConfig,
    check_id,
    invalid_subscription,
    parse_config,
    parse_streams,
)
from tailrace.subscriptions.runner import StepCallback, SubscriptionRunner
from tailrace.subscriptions.service import SubscriptionService
from tailrace.subscriptions.state_machine import Step, StreamAck, WakeAnswer

JWKS_HEAD = (
    b"Content-Type: application/jwk-set+json\r\nCache-Control: public, max-age=%d\r\n" % keys.JWKS_CACHE_S
)
JSON_HEAD = responses.JSON_TYPE + responses.NO_STORE

# The caller waits for this; a slower name server is checked at the first delivery.
RESOLVE_S_MAX = 2.0

Identify = Callable[[Exchange], Identity]
Handler = Callable[[Exchange, str, Identify], None]


class _AckBody(msgspec.Struct):
    stream: str
    offset: str


class _AnswerBody(msgspec.Struct):
    wake_id: str
    generation: int
    acks: Annotated[list[_AckBody], msgspec.Meta(max_length=STREAMS_MAX)] = msgspec.field(
        default_factory=list[_AckBody]
    )
    done: bool = False


class _ClaimBody(msgspec.Struct):
    worker: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


_decode_answer = msgspec.json.Decoder(_AnswerBody).decode
_decode_claim = msgspec.json.Decoder(_ClaimBody).decode


class SubscriptionRoutes:
    """Everything under `__ds`. Wakes are answered with their own token, so each route authenticates."""

    def __init__(self, context: Context, service: SubscriptionService) -> None:
        self._context = context
        self._service = service
        self._tasks = TaskSet()
        self._subscription_handlers: dict[bytes, Handler] = {
            b"PUT": self._put,
            b"GET": self._get,
            b"HEAD": self._get,
            b"DELETE": self._delete,
        }
        self._action_handlers: dict[bytes, Handler] = {
            b"streams": self._add_streams,
            b"claim": self._claim,
            b"callback": self._callback,
            b"ack": self._ack,
            b"release": self._release,
        }

    def handle(self, exchange: Exchange, rest: bytes, identify: Identify) -> None:
        """`rest` is the raw path after `/v1/stream/__ds`."""
        if rest == b"/jwks.json":
            _allow(exchange, b"GET", b"HEAD")
            exchange.respond(200, JWKS_HEAD, self._service.keys.jwks())
            return
        segments = rest.split(b"/")
        if len(segments) < 3 or segments[:2] != [b"", b"subscriptions"]:
            raise TailraceError("not_found", "no resource at this path")
        subscription_id = stream_names.decode_name(segments[2])
        if subscription_id is None:
            raise invalid_subscription("a subscription id must be UTF-8")
        check_id(subscription_id)
        if len(segments) == 3:
            _allow(exchange, *self._subscription_handlers)
            self._subscription_handlers[exchange.method](exchange, subscription_id, identify)
        elif len(segments) == 4 and segments[3] in self._action_handlers:
            _allow(exchange, b"POST")
            self._action_handlers[segments[3]](exchange, subscription_id, identify)
        elif len(segments) >= 5 and segments[3] == b"streams":
            _allow(exchange, b"DELETE")
            self._remove_stream(exchange, subscription_id, b"/".join(segments[4:]), identify)
        else:
            raise TailraceError("not_found", "no resource at this path")

    # -- management ----------------------------------------------------------------------------------------

    def _put(self, exchange: Exchange, subscription_id: str, identify: Identify) -> None:
        identity = identify(exchange)
        authorise(identity, Action.MANAGE_SUBSCRIPTION)
        config = parse_config(exchange.body, self._context.limits)
        authorise_all(identity, Action.MANAGE_SUBSCRIPTION, config.streams, config.pattern)
        if config.wake_stream is not None:
            # The server writes there on behalf of the caller, who must be allowed to.
            authorise(identity, Action.WRITE_STREAM, stream=config.wake_stream)
        if config.webhook_url is None:
            self._create(exchange, subscription_id, config)
            return
        target = ssrf.check_url(config.webhook_url, self._service.webhooks.rules)
        self._tasks.start(self._resolve(exchange, subscription_id, config, target))

    async def _resolve(
        self, exchange: Exchange, subscription_id: str, config: SubscriptionConfig, target: ssrf.WebhookTarget
    ) -> None:
        """Check the addresses of the host, as before every delivery. An unknown host may appear later."""
        try:
            try:
                lookup = self._context.loop.run_in_executor(None, ssrf.check_target, target)
                await asyncio.wait_for(lookup, RESOLVE_S_MAX)
            except (OSError, TimeoutError):
                pass
            self._create(exchange, subscription_id, config)
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)

    def _create(self, exchange: Exchange, subscription_id: str, config: SubscriptionConfig) -> None:
        base_url = responses.base_url(exchange, self._context.settings)
        kid = self._service.keys.current().kid

        def callback(runner: SubscriptionRunner, new: bool, error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
            else:
                exchange.respond(
                    201 if new else 200, JSON_HEAD, views.subscription_body(runner.sub, kid, base_url)
                )

        self._service.create(subscription_id, config, base_url, callback)

    def _get(self, exchange: Exchange, subscription_id: str, identify: Identify) -> None:
        runner = self._find(identify(exchange), Action.READ_SUBSCRIPTION, subscription_id)
        base_url = responses.base_url(exchange, self._context.settings)
        kid = self._service.keys.current().kid
        exchange.respond(200, JSON_HEAD, views.subscription_body(runner.sub, kid, base_url))

    def _delete(self, exchange: Exchange, subscription_id: str, identify: Identify) -> None:
        identity = identify(exchange)
        try:
            runner = self._find(identity, Action.MANAGE_SUBSCRIPTION, subscription_id)
        except TailraceError as refusal:
            if refusal.code != "SUBSCRIPTION_NOT_FOUND":
                raise
            exchange.respond(204, responses.NO_STORE)
            return

        def callback(_: Step, error: TailraceError | None) -> None:
            # A concurrent deletion is a success.
            if error is not None and error.code != "SUBSCRIPTION_NOT_FOUND":
                responses.respond_error(exchange, error)
            else:
                exchange.respond(204, responses.NO_STORE)

        self._service.delete(runner, callback)

    def _add_streams(self, exchange: Exchange, subscription_id: str, identify: Identify) -> None:
        identity = identify(exchange)
        runner = self._find(identity, Action.MANAGE_SUBSCRIPTION, subscription_id)
        paths = parse_streams(exchange.body, self._context.limits)
        authorise_all(identity, Action.MANAGE_SUBSCRIPTION, paths, None)
        self._service.add_streams(runner, paths, _answer_empty(exchange))

    def _remove_stream(
        self, exchange: Exchange, subscription_id: str, raw: bytes, identify: Identify
    ) -> None:
        runner = self._find(identify(exchange), Action.MANAGE_SUBSCRIPTION, subscription_id)
        path = stream_names.decode_name(raw)
        if path is None:
            raise invalid_subscription("a stream name must be UTF-8")
        self._service.remove_stream(runner, path, _answer_empty(exchange))

    def _find(self, identity: Identity, action: Action, subscription_id: str) -> SubscriptionRunner:
        """The subscription, if the caller may read all of its streams."""
        authorise(identity, action)
        runner = self._service.find(subscription_id)
        explicit = [path for path, link in runner.sub.links.items() if link.explicit]
        authorise_all(identity, action, explicit, runner.config.pattern)
        return runner

    # -- wakes ---------------------------------------------------------------------------------------------

    def _claim(self, exchange: Exchange, subscription_id: str, identify: Identify) -> None:
        runner = self._find(identify(exchange), Action.CLAIM_WAKE, subscription_id)
        if runner.config.type != "pull-wake":
            raise invalid_subscription("only pull-wake subscriptions can be claimed; webhook wakes are sent")
        try:
            worker = _decode_claim(exchange.body).worker
        except msgspec.DecodeError as error:
            raise invalid_subscription(f"invalid claim: {error}") from None
        token_key = self._service.keys.token_key

        def callback(step: Step, error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
                return
            assert step.wake is not None, "a claim is granted with its wake"
            now_ms = self._service.now_ms()
            token = keys.issue_wake_token(token_key, runner.sub.id, step.wake.generation, now_ms)
            exchange.respond(200, JSON_HEAD, views.claim_body(runner.sub, step.wake, token))

        self._service.claim(runner, worker, callback)

    def _callback(self, exchange: Exchange, subscription_id: str, _: Identify) -> None:
        self._answer_wake(exchange, subscription_id, "webhook")

    def _ack(self, exchange: Exchange, subscription_id: str, _: Identify) -> None:
        self._answer_wake(exchange, subscription_id, "pull-wake")

    def _release(self, exchange: Exchange, subscription_id: str, _: Identify) -> None:
        self._answer_wake(exchange, subscription_id, "pull-wake", release=True)

    def _answer_wake(
        self, exchange: Exchange, subscription_id: str, kind: str, *, release: bool = False
    ) -> None:
        """The wake's own token authorizes the request; it is checked before anything is revealed."""
        token = keys.read_bearer_token(
            self._service.keys.token_key, exchange.headers.get(b"authorization"), subscription_id
        )
        runner = self._service.find(subscription_id)
        if runner.config.type != kind:
            raise invalid_subscription(f"this is a {runner.config.type} subscription")
        try:
            body = _decode_answer(exchange.body)
        except msgspec.DecodeError as error:
            raise invalid_subscription(f"invalid answer to a wake: {error}") from None
        acks = [StreamAck(ack.stream, _normalise(ack.offset)) for ack in body.acks]
        wake_answer = WakeAnswer(token.generation, body.generation, body.wake_id, acks, body.done)
        callback = _answer_empty(exchange) if release else _answer_next(exchange)
        self._service.answer(runner, token, wake_answer, callback, release=release)


def authorise_all(
    identity: Identity, action: Action, paths: list[str] | tuple[str, ...], pattern: str | None
) -> None:
    """Require read access to each named stream and to the whole pattern."""
    if pattern is not None:
        authorise(identity, action, pattern=pattern)
    for path in paths:
        authorise(identity, action, stream=path)


def _normalise(offset: str) -> str:
    """The offset in canonical form; empty if it is invalid, which the state machine rejects."""
    try:
        return offsets.encode_offset(*offsets.parse_offset(offset))
    except TailraceError:
        return ""


def _answer_empty(exchange: Exchange) -> StepCallback:
    def callback(_: Step, error: TailraceError | None) -> None:
        if error is not None:
            responses.respond_error(exchange, error)
        else:
            exchange.respond(204, responses.NO_STORE)

    return callback


def _answer_next(exchange: Exchange) -> StepCallback:
    def callback(step: Step, error: TailraceError | None) -> None:
        if error is not None:
            responses.respond_error(exchange, error)
        else:
            body = orjson.dumps({"ok": True, "next_wake": step.wake is not None})
            exchange.respond(200, JSON_HEAD, body)

    return callback


def _allow(exchange: Exchange, *methods: bytes) -> None:
    if exchange.method not in methods:
        allow = ", ".join([*(method.decode() for method in methods), "OPTIONS"])
        raise TailraceError("method_not_allowed", f"method must be {allow}", headers=(("Allow", allow),))
