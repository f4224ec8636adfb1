"""The keys that tokens are signed with: in the log, as tokens must outlive a crash, and changed in time."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.log import Log
from tailrace.log.transaction import Transaction
from tailrace.watch.tokens import KeyRing, TokenSigner, decode_key_ring, encode_key_ring

logger = logging.getLogger("tailrace.watch")

TOKEN_KEYS_FACT: Final = "secret/watch-token-keys"


class TokenKeys:
    """Owned by the loop thread. A key signs when it is durable, not before."""

    def __init__(self, log: Log, clock: Clock, limits: Limits) -> None:
        self._log = log
        self._clock = clock
        self._life_ms = limits.watch_key_ms
        self._verify_ms = limits.watch_key_verify_ms
        self.signer: TokenSigner | None = None
        self._writing = False
        self._settled = asyncio.Event()  # nothing is being written

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def start(self) -> None:
        raw = self._log.streams.meta.get(TOKEN_KEYS_FACT)
        if raw is not None:
            self._use(decode_key_ring(raw))
        self.look()

    async def settled(self) -> None:
        """Until what is being written is durable, or is known not to be."""
        if self._writing:
            await self._settled.wait()

    def look(self) -> None:
        """Called now and then: makes the first key, or the next one when it is time."""
        if self._writing or self._log.refusal is not None:
            return
        now_ms = self._now_ms()
        if self.signer is None:
            self._write(KeyRing.first(now_ms))
        elif self.signer.ring.is_due(now_ms, self._life_ms):
            self._write(self.signer.ring.rotated(now_ms, self._verify_ms))
            logger.info("realtime tokens are signed with a new key")

    def _write(self, ring: KeyRing) -> None:
        self._writing = True
        self._settled.clear()

        def durable(_: Transaction, error: TailraceError | None) -> None:
            self._writing = False
            if error is None:
                self._use(ring)
            self._settled.set()

        self._log.put_meta(TOKEN_KEYS_FACT, encode_key_ring(ring), durable)

    def _use(self, ring: KeyRing) -> None:
        if self.signer is None:
            self.signer = TokenSigner(ring, self._verify_ms, self._now_ms)
        else:
            self.signer.ring = ring
