"""Routes of subscriptions, `/v1/stream/__ds/...`: authorization, requests, responses."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final, TypedDict

import msgspec
import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol import offsets
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses
from tailrace.routing.openapi import STRING, Component, Json, answer, array, headers, obj, request
from tailrace.routing.table import Auth, Handler, Identify, Route, route_group
from tailrace.subscriptions import keys, ssrf, views
from tailrace.subscriptions.model import (
    STREAMS_MAX,
    StreamNames,
    SubscriptionConfig,
    SubscriptionRequest,
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


class AckBody(msgspec.Struct):
    stream: str
    offset: str


class WakeAnswerBody(msgspec.Struct):
    wake_id: str
    generation: int
    acks: Annotated[list[AckBody], msgspec.Meta(max_length=STREAMS_MAX)] = msgspec.field(
        default_factory=list[AckBody]
    )
    done: bool = False


class Claim(msgspec.Struct):
    worker: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class WakeAnswered(TypedDict):
    ok: bool
    next_wake: bool


_decode_answer = msgspec.json.Decoder(WakeAnswerBody).decode
_decode_claim = msgspec.json.Decoder(Claim).decode


class SubscriptionRoutes:
    """Everything under `__ds`. Wakes are answered with their own token."""

    def __init__(self, context: Context, service: SubscriptionService) -> None:
        self._context = context
        self._service = service
        self._deferred = DeferredResponses()

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
        self._deferred.respond(exchange, self._resolve(exchange, subscription_id, config, target))

    async def _resolve(
        self, exchange: Exchange, subscription_id: str, config: SubscriptionConfig, target: ssrf.WebhookTarget
    ) -> None:
        """Check the addresses of the host, as before every delivery. An unknown host may appear later."""
        try:
            lookup = self._context.loop.run_in_executor(None, ssrf.check_target, target)
            await asyncio.wait_for(lookup, RESOLVE_S_MAX)
        except (OSError, TimeoutError):
            pass
        self._create(exchange, subscription_id, config)

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
            body: WakeAnswered = {"ok": True, "next_wake": step.wake is not None}
            exchange.respond(200, JSON_HEAD, orjson.dumps(body))

    return callback


_KEYS: Final = Component("KeySet", obj({"keys": array(obj({"kty": STRING, "kid": STRING}))}))
_CONFIG_EXAMPLE: Final[Json] = {
    "type": "pull-wake",
    "pattern": "orders/*",
    "wake_stream": "wakes/orders",
    "lease_ttl_ms": 30_000,
}
_ANSWER: Final = request(
    WakeAnswerBody,
    {
        "wake_id": "w1",
        "generation": 1,
        "acks": [{"stream": "orders/1", "offset": "00000000000000000008000000"}],
        "done": True,
    },
    "The progress of the worker.",
)
_ONE: Final = "/v1/stream/__ds/subscriptions/{id}"


def _answer_route(handler: Handler, operation: str, summary: str, responses: dict[int, Json]) -> Route:
    return Route(
        *("POST", f"{_ONE}/{handler.__name__}", Action.ANSWER_WAKE, handler, operation, summary, responses),
        errors=(401, 404, 409, 507),
        body=_ANSWER,
        description="Requires the token of the wake itself, also on servers without authentication.",
        auth=Auth.BY_HANDLER,
    )


ROUTES: Final = route_group(
    "subscriptions",
    Route(
        *("GET", "/v1/stream/__ds/jwks.json", Action.PUBLIC, SubscriptionRoutes.jwks, "readWebhookKeys"),
        "Public keys of webhook signatures",
        {
            200: {
                "description": "The keys.",
                "headers": headers("Cache-Control"),
                "content": {"application/jwk-set+json": {"schema": _KEYS}},
            }
        },
        auth=Auth.BY_HANDLER,
    ),
    Route(
        *("PUT", _ONE, Action.MANAGE_SUBSCRIPTION, SubscriptionRoutes.put, "createSubscription"),
        "Create a subscription, or confirm its configuration",
        {
            200: answer("The subscription exists.", views.SubscriptionBody),
            201: answer("The subscription was created.", views.SubscriptionBody),
        },
        errors=(404, 405, 409, 507),
        body=request(SubscriptionRequest, _CONFIG_EXAMPLE, "The configuration."),
    ),
    Route(
        *("GET", _ONE, Action.READ_SUBSCRIPTION, SubscriptionRoutes.get, "readSubscription"),
        "Show a subscription",
        {200: answer("The subscription.", views.SubscriptionBody)},
        errors=(404,),
    ),
    Route(
        *("DELETE", _ONE, Action.MANAGE_SUBSCRIPTION, SubscriptionRoutes.delete, "deleteSubscription"),
        "Remove a subscription",
        {204: answer("Removed, by this request or an earlier one.")},
        errors=(409, 507),
    ),
    Route(
        *(
            "POST",
            f"{_ONE}/streams",
            Action.MANAGE_SUBSCRIPTION,
            SubscriptionRoutes.add_streams,
            "addStreams",
        ),
        "Add streams by name",
        {204: answer("The streams are subscribed.")},
        errors=(404, 409, 507),
        body=request(StreamNames, {"streams": ["orders/1"]}, "Names of streams."),
    ),
    Route(
        *("DELETE", f"{_ONE}/streams/{{name}}", Action.MANAGE_SUBSCRIPTION, SubscriptionRoutes.remove_stream),
        "removeStream",
        "Remove a stream that was added by name",
        {204: answer("The stream is not subscribed by name.")},
        errors=(404, 409, 507),
    ),
    Route(
        *("POST", f"{_ONE}/claim", Action.CLAIM_WAKE, SubscriptionRoutes.claim, "claimWake"),
        "Claim the work of a pull-wake subscription",
        {200: answer("The work, and a token to report progress with.", views.ClaimedWake)},
        errors=(404, 409, 507),
        body=request(Claim, {"worker": "worker-1"}, "The worker."),
    ),
    _answer_route(
        *(SubscriptionRoutes.callback, "answerWebhook", "A webhook's worker reports progress"),
        {200: answer("The progress is stored.", WakeAnswered)},
    ),
    _answer_route(
        *(SubscriptionRoutes.ack, "acknowledge", "A pull-wake worker reports progress"),
        {200: answer("The progress is stored.", WakeAnswered)},
    ),
    _answer_route(
        *(SubscriptionRoutes.release, "release", "A pull-wake worker releases the work"),
        {204: answer("The work is released.")},
    ),
    place="first",
)
