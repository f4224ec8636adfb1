"""Webhook deliveries: signed, to checked addresses, a bounded number at once."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
from collections.abc import Callable
from typing import Final, Protocol

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.subscriptions import deliver, ssrf, state_machine, tokens, views
from tailrace.subscriptions.keys import ServerKeys
from tailrace.subscriptions.model import Wake
from tailrace.subscriptions.runner import SubscriptionJob, SubscriptionRunner
from tailrace.subscriptions.state_machine import Step

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
        except (deliver.DeliveryError, TailraceError, OSError) as error:
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
    ) -> deliver.WebhookResponse:
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
        return await deliver.post_webhook(
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
