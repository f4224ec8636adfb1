"""The server's own keys: one to sign webhooks, one for callback tokens. Made once, kept in the log."""

from __future__ import annotations

from typing import Final

from tailrace.clock import Clock
from tailrace.errors import TailraceError
from tailrace.log.log import Log
from tailrace.log.transaction import Transaction
from tailrace.subscriptions import signing, tokens

# Prefixed so that whatever prints the server's facts knows what to leave out.
SIGNING_KEYS: Final = "secret/webhook-keys"
TOKEN_KEY: Final = "secret/wake-token-key"  # noqa: S105 (the name of a record)


class ServerKeys:
    """Nothing is signed with a key that is not durable: it could be gone after a crash."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._ring: signing.KeyRing | None = None
        self._token_key: bytes | None = None

    def load(self) -> None:
        meta = self._log.streams.meta
        ring, token_key = meta.get(SIGNING_KEYS), meta.get(TOKEN_KEY)
        if ring is not None and token_key is not None:
            self._ring, self._token_key = signing.decode_ring(ring), token_key
        elif self._log.refusal is None:
            self._make()

    @property
    def ring(self) -> signing.KeyRing:
        if self._ring is None:
            raise self._missing()
        return self._ring

    @property
    def token_key(self) -> bytes:
        if self._token_key is None:
            raise self._missing()
        return self._token_key

    def jwks(self) -> bytes:
        return self.ring.jwks(self._clock.now_ns() // 1_000_000)

    def _make(self) -> None:
        ring, token_key = signing.new_ring(self._clock.now_ns() // 1_000_000), tokens.new_key()

        def saved(_: Transaction, error: TailraceError | None) -> None:
            if error is None and self._ring is None:
                self._ring, self._token_key = ring, token_key

        self._log.put_metas([(SIGNING_KEYS, ring.encode()), (TOKEN_KEY, token_key)], saved)

    def _missing(self) -> TailraceError:
        """The disk was full when the server started. Making keys is tried again whenever one is needed."""
        if SIGNING_KEYS not in self._log.streams.meta and self._log.refusal is None:
            self._make()
        return TailraceError("unavailable", "the server's signing keys are not saved yet")
