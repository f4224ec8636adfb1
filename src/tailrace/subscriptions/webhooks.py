"""Webhook delivery: signed POST requests to checked addresses, bounded in time, size and number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import httptools
import msgspec

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.common.tasks import TaskSet
from tailrace.subscriptions import keys as tokens
from tailrace.subscriptions import ssrf, state_machine, views
from tailrace.subscriptions.keys import ServerKeys
from tailrace.subscriptions.model import Wake
from tailrace.subscriptions.runner import SubscriptionJob, SubscriptionRunner, ignore_outcome
from tailrace.subscriptions.ssrf import WebhookTarget
from tailrace.subscriptions.state_machine import Step

HEAD_BYTES_MAX: Final = 64 * 1024
READ_BYTES: Final = 16 * 1024


class WebhookResponse(NamedTuple):
    status: int
    body: bytes  # as much as was read
    complete: bool

    @property
    def accepted(self) -> bool:
        return 200 <= self.status < 300

    @property
    def done(self) -> bool:
        """Whether the worker has already processed the wake."""
        if not (self.accepted and self.complete):
            return False
        try:
            return msgspec.json.decode(self.body, type=_ResponseBody).done is True
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


class _ResponseBody(msgspec.Struct):
    done: object = False


class DeliveryError(Exception):
    """No usable response; the message has the reason, without secrets."""


async def post_webhook(
    target: WebhookTarget,
    addresses: Sequence[str],
    headers: Sequence[tuple[str, str]],
    body: bytes,
    *,
    answer_bytes_max: int,
    tls: ssl.SSLContext | None,
) -> WebhookResponse:
    """Send the body and read the response. The caller limits the time by cancelling."""
    reader, writer = await _connect(target, addresses, tls)
    try:
        lines = [f"POST {target.path} HTTP/1.1", f"Host: {target.authority}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += ["User-Agent: tailrace", "Accept: application/json", "Connection: close"]
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        await writer.drain()
        return await _read(reader, answer_bytes_max)
    except (OSError, httptools.HttpParserError) as error:
        raise DeliveryError(str(error) or type(error).__name__) from None
    finally:
        writer.transport.abort()


async def _connect(
    target: WebhookTarget, addresses: Sequence[str], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first checked address that accepts. The host name is used only for the certificate."""
    assert (target.scheme == "https") == (tls is not None)
    problem = "the host has no address"
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address, target.port, ssl=tls, server_hostname=target.host if tls is not None else None
            )
        except OSError as error:
            problem = error.strerror or str(error)
    raise DeliveryError(f"cannot connect: {problem}")


class _ResponseReader:
    """Collects one response; the callback object of httptools."""

    def __init__(self, parser_of: type[httptools.HttpResponseParser], body_bytes_max: int) -> None:
        self.parser = parser_of(self)
        self._body_bytes_max = body_bytes_max
        self.status = 0
        self.body = bytearray()
        self.head_complete = False
        self.complete = False
        self.full = False

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.head_complete = self.status >= 200

    def on_body(self, data: bytes) -> None:
        room = self._body_bytes_max - len(self.body)
        self.full = self.full or len(data) > room
        self.body += data[:room]

    def on_message_complete(self) -> None:
        # An interim response (1xx) precedes the final one.
        self.complete = self.head_complete


async def _read(reader: asyncio.StreamReader, body_bytes_max: int) -> WebhookResponse:
    response = _ResponseReader(httptools.HttpResponseParser, body_bytes_max)
    head_bytes = 0
    while not (response.complete or response.full):
        data = await reader.read(READ_BYTES)
        if not data:
            if not response.head_complete:
                raise DeliveryError("the connection was closed without a response")
            break
        if not response.head_complete:
            head_bytes += len(data)
            if head_bytes > HEAD_BYTES_MAX + READ_BYTES:
                raise DeliveryError("the response head is too long")
        # Data after a complete message is ignored.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            response.parser.feed_data(data)
    return WebhookResponse(response.status, bytes(response.body), not response.full)


logger = logging.getLogger("tailrace.subscriptions")

DELIVERIES_AT_ONCE: Final = 64


class WebhookSpan(Protocol):
    """The trace span of a webhook call."""

    @property
    def traceparent(self) -> str: ...
    def end(self, outcome: str) -> None: ...


StartWebhookSpan = Callable[[str], WebhookSpan]  # by subscription id


class WebhookSender:
    """Sends wakes to webhooks."""

    def __init__(
        self,
        settings: Settings,
        keys: ServerKeys,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        telemetry: ServerMetrics,
        trace: StartWebhookSpan | None = None,
    ) -> None:
        self._limits = settings.limits
        self._public_url = settings.public_url.rstrip("/")
        self._keys = keys
        self._clock = clock
        self._loop = loop
        self._outcomes = telemetry.webhook_deliveries
        self.rules = ssrf.url_rules(settings)
        self._tasks = TaskSet()
        self._slots = asyncio.Semaphore(DELIVERIES_AT_ONCE)
        self._tls: ssl.SSLContext | None = None
        self._trace = trace

    def send(self, runner: SubscriptionRunner, wake: Wake) -> None:
        runner.sub.delivering = wake.generation
        self._tasks.start(self._deliver(runner, wake))

    async def stop(self) -> None:
        """Cancel running deliveries; the next server retries them."""
        await self._tasks.close()

    async def _deliver(self, runner: SubscriptionRunner, wake: Wake) -> None:
        """One delivery attempt; its outcome is a state machine step."""
        accepted = done = False
        traced = None if self._trace is None else self._trace(runner.sub.id)
        try:
            async with self._slots:
                response = await asyncio.wait_for(
                    self._post(runner, wake, traced), self._limits.webhook_ms / 1000
                )
            accepted, done = response.accepted, response.done
            problem = "" if accepted else f"status {response.status}"
        except TimeoutError:
            problem = "no response in time"
        except (DeliveryError, TailraceError, OSError) as error:
            problem = str(error)
        outcome = "done" if done else "accepted" if accepted else "failed"
        self._outcomes.add(outcome)
        if traced is not None:
            traced.end(outcome)
        if runner.closed:
            return
        if problem:
            fields = log_fields(subscription=runner.sub.id, error=problem)
            logger.warning("webhook delivery failed", extra=fields)

        def decide(now_ms: int) -> Step:
            sub = runner.sub
            if sub.delivering == wake.generation:
                sub.delivering = None
            if sub.deleted:
                return Step()
            if accepted:
                return state_machine.delivery_succeeded(
                    sub, wake.generation, done=done, now_ms=now_ms, wake_id=new_wake_id()
                )
            jitter = random.uniform(-1, 1)  # noqa: S311 (spreads retries, not a secret)
            return state_machine.delivery_failed(sub, wake.generation, now_ms, jitter)

        runner.submit(SubscriptionJob(decide, ignore_outcome, must_succeed=True))

    async def _post(
        self, runner: SubscriptionRunner, wake: Wake, traced: WebhookSpan | None
    ) -> WebhookResponse:
        sub = runner.sub
        url = runner.config.webhook_url
        assert url is not None, "a webhook subscription has a URL"
        target = ssrf.check_url(url, self.rules)
        addresses = await self._loop.run_in_executor(None, ssrf.check_target, target)
        now_ms = self._clock.now_ns() // 1_000_000
        token = tokens.issue_wake_token(self._keys.token_key, sub.id, wake.generation, now_ms)
        body = views.webhook_body(sub, wake, token, self._public_url or sub.head.base_url)
        signature = self._keys.current().sign(body, now_ms)
        if target.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        headers = [("Content-Type", "application/json"), ("Webhook-Signature", signature)]
        if traced is not None:
            headers.append(("traceparent", traced.traceparent))
        return await post_webhook(
            target,
            addresses,
            headers,
            body,
            answer_bytes_max=self._limits.webhook_answer_bytes,
            tls=self._tls if target.scheme == "https" else None,
        )


def new_wake_id() -> str:
    return f"w_{secrets.token_urlsafe(12)}"
