"""Webhook delivery: signed POST requests, bounded in time, size and number.

One webhook call: a POST to an address that was checked, bounded in time and size, no redirects.

Webhook deliveries: signed, to checked addresses, a bounded number at once.
"""

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
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.subscriptions import keys as tokens
from tailrace.subscriptions import ssrf, state_machine, views
from tailrace.subscriptions.keys import ServerKeys
from tailrace.subscriptions.model import Wake
from tailrace.subscriptions.runner import SubscriptionJob, SubscriptionRunner
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
        """Whether a worker says that it has dealt with the wake already."""
        if not (self.accepted and self.complete):
            return False
        try:
            return msgspec.json.decode(self.body, type=_ResponseBody).done is True
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


class _ResponseBody(msgspec.Struct):
    done: object = False


class DeliveryError(Exception):
    """No usable answer; the message says why, without secrets."""


async def post_webhook(
    target: WebhookTarget,
    addresses: Sequence[str],
    headers: Sequence[tuple[str, str]],
    body: bytes,
    *,
    answer_bytes_max: int,
    tls: ssl.SSLContext | None,
) -> WebhookResponse:
    """Sends the body and reads the answer. The caller sets the time limit by cancelling."""
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
    """The first checked address that answers. The name is used for the certificate, never looked up again."""
    assert (target.scheme == "https") == (tls is not None)
    trouble = "the host has no address"
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address, target.port, ssl=tls, server_hostname=target.host if tls is not None else None
            )
        except OSError as error:
            trouble = error.strerror or str(error)
    raise DeliveryError(f"cannot connect: {trouble}")


class _ResponseReader:
    """Collects one response; what httptools calls while it parses."""

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
        # An interim answer (1xx) announces the real one.
        self.complete = self.head_complete


async def _read(reader: asyncio.StreamReader, body_bytes_max: int) -> WebhookResponse:
    answer = _ResponseReader(httptools.HttpResponseParser, body_bytes_max)
    head_bytes = 0
    while not (answer.complete or answer.full):
        data = await reader.read(READ_BYTES)
        if not data:
            if not answer.head_complete:
                raise DeliveryError("the connection was closed without an answer")
            break
        if not answer.head_complete:
            head_bytes += len(data)
            if head_bytes > HEAD_BYTES_MAX + READ_BYTES:
                raise DeliveryError("the answer's head is too long")
        # After a complete message the rest of the data is not ours.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            answer.parser.feed_data(data)
    return WebhookResponse(answer.status, bytes(answer.body), not answer.full)


logger = logging.getLogger("tailrace.subscriptions")

DELIVERIES_AT_ONCE: Final = 64


class WebhookSpan(Protocol):
    """A call that is part of a trace."""

    @property
    def traceparent(self) -> str: ...
    def end(self, outcome: str) -> None: ...


class WebhookSender:
    """Sends wakes to hooks."""

    def __init__(
        self,
        settings: Settings,
        keys: ServerKeys,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        telemetry: ServerMetrics,
    ) -> None:
        self._limits = settings.limits
        self._public_url = settings.public_url.rstrip("/")
        self._keys = keys
        self._clock = clock
        self._loop = loop
        self._outcomes = telemetry.webhook_deliveries
        self.rules = ssrf.url_rules(settings)
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(DELIVERIES_AT_ONCE)
        self._tls: ssl.SSLContext | None = None
        self.trace: Callable[[str], WebhookSpan] | None = None  # begins a trace with a call, by subscription

    def send(self, agent: SubscriptionRunner, wake: Wake) -> None:
        agent.sub.delivering = wake.generation
        task = self._loop.create_task(self._deliver(agent, wake))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Ends deliveries under way; the next server tries them again."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _deliver(self, agent: SubscriptionRunner, wake: Wake) -> None:
        """One attempt; its outcome is a decision like any other."""
        accepted = done = False
        traced = None if self.trace is None else self.trace(agent.sub.id)
        try:
            async with self._slots:
                response = await asyncio.wait_for(
                    self._post(agent, wake, traced), self._limits.webhook_ms / 1000
                )
            accepted, done = response.accepted, response.done
            trouble = "" if accepted else f"it answered {response.status}"
        except TimeoutError:
            trouble = "it did not answer in time"
        except (DeliveryError, TailraceError, OSError) as error:
            trouble = str(error)
        outcome = "done" if done else "accepted" if accepted else "failed"
        self._outcomes.add(outcome)
        if traced is not None:
            traced.end(outcome)
        if agent.closed:
            return
        if trouble:
            logger.warning("webhook of subscription %r failed: %s", agent.sub.id, trouble)

        def decide(now_ms: int) -> Step:
            sub = agent.sub
            if sub.delivering == wake.generation:
                sub.delivering = None
            if sub.deleted:
                return Step()
            if accepted:
                return state_machine.delivery_succeeded(
                    sub, wake.generation, done=done, now_ms=now_ms, wake_id=new_wake_id()
                )
            jitter = random.uniform(-1, 1)  # noqa: S311 (spreads retries, keeps no secret)
            return state_machine.delivery_failed(sub, wake.generation, now_ms, jitter)

        agent.submit(SubscriptionJob(decide, _ignore_outcome, lasting=True))

    async def _post(
        self, agent: SubscriptionRunner, wake: Wake, traced: WebhookSpan | None
    ) -> WebhookResponse:
        sub = agent.sub
        url = agent.config.webhook_url
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


def _ignore_outcome(_step: Step, _error: TailraceError | None) -> None:
    """The outcome of a delivery concerns nobody but the subscription."""
