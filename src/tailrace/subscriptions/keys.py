"""The server's own keys: those that sign webhooks, and one for callback tokens. They are kept in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.log.log import Log
from tailrace.log.transaction import Transaction
from tailrace.subscriptions import signing, tokens

logger = logging.getLogger("tailrace.subscriptions")

# Prefixed so that whatever prints the server's facts knows what to leave out.
SIGNING_KEYS_RECORD: Final = "secret/webhook-keys"
TOKEN_KEY_RECORD: Final = "secret/wake-token-key"  # noqa: S105 (the name of a record)
# The wall clock may be set while a timer runs, so no timer runs for long.
TIMER_S_MAX: Final = 3600.0
RETRY_S: Final = 5.0


class ServerKeys:
    """Nothing is signed with a key that is not durable: it could be gone after a crash."""

    def __init__(self, log: Log, clock: Clock, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        self._log = log
        self._clock = clock
        self._loop = loop
        self._age_ms_max = settings.limits.webhook_key_ms
        self._since_ms = settings.webhook_keys_since_ms
        self._ring: signing.WebhookKeyRing | None = None
        self._token_key: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def load(self) -> None:
        meta = self._log.streams.meta
        saved, token_key = meta.get(SIGNING_KEYS_RECORD), meta.get(TOKEN_KEY_RECORD)
        if saved is None or token_key is None:
            if self._log.refusal is None:
                self._make()
            return
        self._token_key = token_key
        ring = signing.decode_key_ring(saved)
        trusted = ring.made_since(self._since_ms)
        if trusted is ring:
            self._ring = ring
            self.rotate()
        else:
            logger.warning("webhook keys made before webhook_keys_since are given up")
            self._replace(trusted or signing.new_key_ring(self._now_ms()))

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def current(self) -> signing.WebhookKey:
        """The key that signs now."""
        return self._saved_ring().current(self._now_ms())

    @property
    def token_key(self) -> bytes:
        if self._token_key is None:
            raise self._missing()
        return self._token_key

    def jwks(self) -> bytes:
        return self._saved_ring().jwks(self._now_ms())

    def rotate(self) -> None:
        """Does what is due: announces the next key, forgets those that nobody needs. Then waits for more."""
        ring = self._saved_ring()
        changed = ring.changed(self._now_ms(), self._age_ms_max)
        if changed is None:
            delay_s = (ring.changes_at_ms(self._age_ms_max) - self._now_ms()) / 1000
            self._wait(min(max(delay_s, 0.0), TIMER_S_MAX), self.rotate)
        else:
            self._save(changed, self.rotate)

    def _replace(self, ring: signing.WebhookKeyRing) -> None:
        """Until this ring is saved there is none: what it replaces is not to be used."""
        self._save(ring, lambda: self._replace(ring))

    def _save(self, ring: signing.WebhookKeyRing, again: Callable[[], None]) -> None:
        def saved(_: Transaction, error: TailraceError | None) -> None:
            if error is not None:
                self._wait(RETRY_S, again)
                return
            self._ring = ring
            logger.info("the webhook keys have changed; %s signs now", self.current().kid)
            self.rotate()

        try:
            self._log.put_meta(SIGNING_KEYS_RECORD, ring.encode(), saved)
        except TailraceError:
            self._wait(RETRY_S, again)

    def _wait(self, delay_s: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._stopped:
            self._timer = self._loop.call_later(delay_s, then)

    def _make(self) -> None:
        ring, token_key = signing.new_key_ring(self._now_ms()), tokens.new_token_key()

        def saved(_: Transaction, error: TailraceError | None) -> None:
            if error is None and self._ring is None:
                self._ring, self._token_key = ring, token_key
                self.rotate()

        self._log.put_metas([(SIGNING_KEYS_RECORD, ring.encode()), (TOKEN_KEY_RECORD, token_key)], saved)

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def _saved_ring(self) -> signing.WebhookKeyRing:
        if self._ring is None:
            raise self._missing()
        return self._ring

    def _missing(self) -> TailraceError:
        """The disk was full when the server started. Making keys is tried again whenever one is needed."""
        if SIGNING_KEYS_RECORD not in self._log.streams.meta and self._log.refusal is None:
            self._make()
        return TailraceError("unavailable", "the server's signing keys are not saved yet")
