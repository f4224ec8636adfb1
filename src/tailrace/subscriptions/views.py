"""JSON bodies of subscriptions: for management, webhooks and workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NotRequired, TypedDict
from urllib.parse import quote

import orjson

from tailrace.common.timestamps import format_rfc3339
from tailrace.routing.openapi import Count, Instant
from tailrace.subscriptions import state_machine
from tailrace.subscriptions.model import Subscription, SubscriptionKind, Wake

CONTROL_PATH: Final = "/v1/stream/__ds"
# Links listed at most; beyond that only their number is returned.
SHOWN_STREAMS_MAX: Final = 10_000


class WebhookSigning(TypedDict):
    alg: str
    kid: str
    jwks_url: str


class Webhook(TypedDict):
    url: str
    signing: WebhookSigning


class SubscribedStream(TypedDict):
    path: str
    link_type: str
    acked_offset: str


class WakeStream(SubscribedStream):
    tail_offset: str
    has_pending: bool


class SubscriptionBody(TypedDict):
    id: str
    subscription_id: str
    type: SubscriptionKind
    pattern: str | None
    streams: list[SubscribedStream]
    streams_total: NotRequired[Count]
    webhook: Webhook | None
    wake_stream: str | None
    lease_ttl_ms: Count
    created_at: Instant
    status: Literal["active", "failed"]
    description: str | None


class ClaimedWake(TypedDict):
    wake_id: str
    generation: Count
    token: str
    streams: list[WakeStream]
    lease_ttl_ms: Count


def subscription_body(sub: Subscription, kid: str, base_url: str) -> bytes:
    """The body of PUT and GET, without secrets."""
    config = sub.config
    streams: list[SubscribedStream] = [
        {"path": path, "link_type": link.kind, "acked_offset": link.acked}
        for path, link in zip(sub.links, sub.links.values(), strict=True)
    ]
    webhook: Webhook | None = None
    if config.webhook_url is not None:
        signing: WebhookSigning = {
            "alg": "ed25519",
            "kid": kid,
            "jwks_url": f"{base_url}{CONTROL_PATH}/jwks.json",
        }
        webhook = {"url": config.webhook_url, "signing": signing}
    body: SubscriptionBody = {
        "id": sub.id,
        "subscription_id": sub.id,
        "type": config.type,
        "pattern": config.pattern,
        "streams": streams[:SHOWN_STREAMS_MAX],
        "webhook": webhook,
        "wake_stream": config.wake_stream,
        "lease_ttl_ms": config.lease_ttl_ms,
        "created_at": format_rfc3339(sub.head.created_ms * 1_000_000),
        "status": status(sub),
        "description": config.description,
    }
    if len(streams) > SHOWN_STREAMS_MAX:
        body["streams_total"] = len(streams)
    return orjson.dumps(body)


def status(sub: Subscription) -> Literal["active", "failed"]:
    """`failed` while a failed delivery waits for its retry."""
    wake = sub.wake
    return "failed" if wake is not None and wake.failures and wake.attempt_at_ms is not None else "active"


def wake_streams(sub: Subscription, tails: Mapping[str, str]) -> list[WakeStream]:
    """The links in a wake; with very many links, only those with pending entries."""
    paths = list(sub.links) if len(sub.links) <= state_machine.LISTED_STREAMS_MAX else list(tails)
    listed: list[WakeStream] = []
    for path in paths:
        link = sub.links.get(path)
        if link is None:
            continue  # unlinked since the wake was issued
        tail = max(tails.get(path, link.acked), link.acked)
        listed.append(
            {
                "path": path,
                "link_type": link.kind,
                "acked_offset": link.acked,
                "tail_offset": tail,
                "has_pending": tail > link.acked,
            }
        )
    return listed


def webhook_body(sub: Subscription, wake: Wake, token: str, base_url: str) -> bytes:
    return orjson.dumps(
        {
            "subscription_id": sub.id,
            "wake_id": wake.id,
            "generation": wake.generation,
            "streams": wake_streams(sub, wake.tails),
            "callback_url": f"{base_url}{CONTROL_PATH}/subscriptions/{quote(sub.id, safe='')}/callback",
            "callback_token": token,
        }
    )


def claim_body(sub: Subscription, wake: Wake, token: str) -> bytes:
    body: ClaimedWake = {
        "wake_id": wake.id,
        "generation": wake.generation,
        "token": token,
        "streams": wake_streams(sub, wake.tails),
        "lease_ttl_ms": sub.config.lease_ttl_ms,
    }
    return orjson.dumps(body)


def wake_event(sub: Subscription, wake: Wake, now_ms: int) -> bytes:
    """The event written to the wake stream."""
    return orjson.dumps(
        {
            "type": "wake",
            "subscription_id": sub.id,
            "stream": next(iter(wake.tails)),
            "generation": wake.generation,
            "ts": now_ms,
        }
    )
