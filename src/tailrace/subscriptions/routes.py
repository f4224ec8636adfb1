"""Routes of subscriptions, `/v1/stream/__ds/...`: authorization, requests, responses."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec
import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol import offsets
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.table import Auth, Identify, Route
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
    """Everything under `__ds`. Wakes are answered with their own token."""

    def __init__(self, context: Context, service: SubscriptionService) -> None:
        self._context = context
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()

    def jwks(self, exchange: Exchange, _: Identify) -> None:
        exchange.respond(200, JWKS_HEAD, self._service.keys.jwks())

    # -- management ----------------------------------------------------------------------------------------

    def put(self, exchange: Exchange, identity: Identity, subscription_id: str) -> None:
        check_id(subscription_id)
        config = parse_config(exchange.body, self._context.limits)
        authorise_all(identity, Action.MANAGE_SUBSCRIPTION, config.streams, config.pattern)
        if config.wake_stream is not None:
            # The server writes there on behalf of the caller, who must be allowed to.
            authorise(identity, Action.WRITE_STREAM, stream=config.wake_stream)
        if config.webhook_url is None:
            self._create(exchange, subscription_id, config)
            return
        target = ssrf.check_url(config.webhook_url, self._service.webhooks.rules)
        task = self._context.loop.create_task(self._resolve(exchange, subscription_id, config, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    def get(self, exchange: Exchange, identity: Identity, subscription_id: str) -> None:
        runner = self._find(identity, Action.READ_SUBSCRIPTION, subscription_id)
        base_url = responses.base_url(exchange, self._context.settings)
        kid = self._service.keys.current().kid
        exchange.respond(200, JSON_HEAD, views.subscription_body(runner.sub, kid, base_url))

    def delete(self, exchange: Exchange, identity: Identity, subscription_id: str) -> None:
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

    def add_streams(self, exchange: Exchange, identity: Identity, subscription_id: str) -> None:
        runner = self._find(identity, Action.MANAGE_SUBSCRIPTION, subscription_id)
        paths = parse_streams(exchange.body, self._context.limits)
        authorise_all(identity, Action.MANAGE_SUBSCRIPTION, paths, None)
        self._service.add_streams(runner, paths, _answer_empty(exchange))

    def remove_stream(self, exchange: Exchange, identity: Identity, subscription_id: str, path: str) -> None:
        runner = self._find(identity, Action.MANAGE_SUBSCRIPTION, subscription_id)
        self._service.remove_stream(runner, path, _answer_empty(exchange))

    def _find(self, identity: Identity, action: Action, subscription_id: str) -> SubscriptionRunner:
        """The subscription, if the caller may read all of its streams."""
        check_id(subscription_id)
        runner = self._service.find(subscription_id)
        explicit = [path for path, link in runner.sub.links.items() if link.explicit]
        authorise_all(identity, action, explicit, runner.config.pattern)
        return runner

    # -- wakes ---------------------------------------------------------------------------------------------

    def claim(self, exchange: Exchange, identity: Identity, subscription_id: str) -> None:
        runner = self._find(identity, Action.CLAIM_WAKE, subscription_id)
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

    def callback(self, exchange: Exchange, _: Identify, subscription_id: str) -> None:
        self._answer_wake(exchange, subscription_id, "webhook")

    def ack(self, exchange: Exchange, _: Identify, subscription_id: str) -> None:
        self._answer_wake(exchange, subscription_id, "pull-wake")

    def release(self, exchange: Exchange, _: Identify, subscription_id: str) -> None:
        self._answer_wake(exchange, subscription_id, "pull-wake", release=True)

    def _answer_wake(
        self, exchange: Exchange, subscription_id: str, kind: str, *, release: bool = False
    ) -> None:
        """The wake's own token authorizes the request; it is checked before anything is revealed."""
        check_id(subscription_id)
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


_ONE: Final = "/v1/stream/__ds/subscriptions/{id}"
_MANAGE: Final = Action.MANAGE_SUBSCRIPTION
_ANSWER: Final = Action.ANSWER_WAKE
_Routes: Final = SubscriptionRoutes
ROUTES: Final = (
    Route(
        "GET",
        "/v1/stream/__ds/jwks.json",
        Action.PUBLIC,
        _Routes.jwks,
        "readWebhookKeys",
        Auth.BY_HANDLER,
        "first",
    ),
    Route("PUT", _ONE, _MANAGE, _Routes.put, "createSubscription", place="first"),
    Route("GET", _ONE, Action.READ_SUBSCRIPTION, _Routes.get, "readSubscription", place="first"),
    Route("DELETE", _ONE, _MANAGE, _Routes.delete, "deleteSubscription", place="first"),
    Route("POST", f"{_ONE}/streams", _MANAGE, _Routes.add_streams, "addStreams", place="first"),
    Route(
        "DELETE", f"{_ONE}/streams/{{name}}", _MANAGE, _Routes.remove_stream, "removeStream", place="first"
    ),
    Route("POST", f"{_ONE}/claim", Action.CLAIM_WAKE, _Routes.claim, "claimWake", place="first"),
    Route("POST", f"{_ONE}/callback", _ANSWER, _Routes.callback, "answerWebhook", Auth.BY_HANDLER, "first"),
    Route("POST", f"{_ONE}/ack", _ANSWER, _Routes.ack, "acknowledge", Auth.BY_HANDLER, "first"),
    Route("POST", f"{_ONE}/release", _ANSWER, _Routes.release, "release", Auth.BY_HANDLER, "first"),
)
