"""Webhook signing keys (Ed25519) with rotation and JWKS, and wake tokens.

Both kinds of secrets are stored in the log. A wake token authorizes a worker to answer one wake; it is
signed, and valid for one subscription and generation.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import Final

import msgspec
import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.settings import Settings
from tailrace.log.log import Log
from tailrace.log.transaction import Transaction

SEED_BYTES: Final = 32
# How long receivers may cache the public keys.
JWKS_CACHE_S: Final = 300
# A receiver may accept a signature for this long, so a retired key stays published for as long.
REPLAY_WINDOW_MS: Final = 5 * 60 * 1000
# A new key is published this long before it signs, so that all cached key sets contain it by then.
ANNOUNCED_MS: Final = 2 * JWKS_CACHE_S * 1000
# A receiver whose clock is behind accepts an old signature a little longer.
CLOCK_SKEW_MS: Final = 60 * 1000


class StoredWebhookKey(msgspec.Struct, frozen=True, array_like=True):
    """A private key as stored: never shown, never logged."""

    seed: bytes
    created_ms: int
    signs_ms: int | None = None  # when it starts to sign, if not at once


class WebhookKey:
    """A key in use: its id, its public form, and signing."""

    __slots__ = ("_private", "jwk", "kid", "saved")

    def __init__(self, saved: StoredWebhookKey) -> None:
        assert len(saved.seed) == SEED_BYTES
        self.saved = saved
        self._private = Ed25519PrivateKey.from_private_bytes(saved.seed)
        x = _base64url(self._private.public_key().public_bytes_raw())
        # RFC 7638: the hash of the required members in this order.
        thumbprint = hashlib.sha256(orjson.dumps({"crv": "Ed25519", "kty": "OKP", "x": x})).digest()
        self.kid = f"ds_{_base64url(thumbprint)}"
        self.jwk = {"kty": "OKP", "crv": "Ed25519", "kid": self.kid, "use": "sig", "alg": "EdDSA", "x": x}

    @property
    def signs_ms(self) -> int:
        saved = self.saved
        return saved.created_ms if saved.signs_ms is None else saved.signs_ms

    def sign(self, body: bytes, now_ms: int) -> str:
        """The Webhook-Signature header for a body."""
        moment_s = now_ms // 1000
        signature = self._private.sign(b"%d.%b" % (moment_s, body))
        return f"t={moment_s},kid={self.kid},ed25519={_base64url(signature)}"


class WebhookKeyRing:
    """The keys of a server, oldest first: retired ones, the signing one, and sometimes the next one.

    The time alone determines which key signs. The time of a switch is stored beforehand; all signatures of
    the old key are from before it, so it also determines when the old key can be dropped.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: tuple[StoredWebhookKey, ...]) -> None:
        assert keys, "a server has a key"
        self._keys = tuple(WebhookKey(saved) for saved in keys)
        moments = [key.signs_ms for key in self._keys]
        assert moments == sorted(moments), "keys take over in order"

    def current(self, now_ms: int) -> WebhookKey:
        """The key that signs now; the oldest one if the clock was set back."""
        return self._keys[self._position(now_ms)]

    def jwks(self, now_ms: int) -> bytes:
        """The public keys, the signing one first."""
        position = self._position(now_ms)
        listed = (self._keys[position], *self._keys[position + 1 :], *self._keys[:position])
        needed = self._needed(now_ms)
        return orjson.dumps({"keys": [key.jwk for key in listed if key in needed]})

    def changed(self, now_ms: int, age_ms_max: int) -> WebhookKeyRing | None:
        """The ring after due changes (next key published, unneeded keys dropped); None if nothing is due."""
        keys = [key.saved for key in self._needed(now_ms)]
        retires_ms = self._keys[-1].signs_ms + age_ms_max
        if now_ms >= retires_ms - ANNOUNCED_MS:
            keys.append(StoredWebhookKey(_new_seed(), now_ms, max(retires_ms, now_ms + ANNOUNCED_MS)))
        elif len(keys) == len(self._keys):
            return None
        return WebhookKeyRing(tuple(keys))

    def created_since(self, since_ms: int) -> WebhookKeyRing | None:
        """The ring without older keys: itself if there are none, None if all are older."""
        recent = tuple(key.saved for key in self._keys if key.saved.created_ms >= since_ms)
        if len(recent) == len(self._keys):
            return self
        return WebhookKeyRing(recent) if recent else None

    def changes_at_ms(self, age_ms_max: int) -> int:
        """When `changed` has something to do."""
        announce_ms = self._keys[-1].signs_ms + age_ms_max - ANNOUNCED_MS
        return announce_ms if len(self._keys) == 1 else min(announce_ms, self._drop_at_ms(1))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode([key.saved for key in self._keys])

    def _position(self, now_ms: int) -> int:
        begun = [position for position, key in enumerate(self._keys) if key.signs_ms <= now_ms]
        return begun[-1] if begun else 0

    def _needed(self, now_ms: int) -> list[WebhookKey]:
        last = len(self._keys) - 1
        return [
            key
            for position, key in enumerate(self._keys)
            if position == last or now_ms < self._drop_at_ms(position + 1)
        ]

    def _drop_at_ms(self, successor: int) -> int:
        """When the key before this one can be dropped."""
        return self._keys[successor].signs_ms + REPLAY_WINDOW_MS + CLOCK_SKEW_MS


def new_key_ring(now_ms: int) -> WebhookKeyRing:
    return WebhookKeyRing((StoredWebhookKey(_new_seed(), now_ms),))


def decode_key_ring(saved: bytes) -> WebhookKeyRing:
    return WebhookKeyRing(tuple(msgspec.msgpack.decode(saved, type=list[StoredWebhookKey])))


def _new_seed() -> bytes:
    return secrets.token_bytes(SEED_BYTES)


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


TOKEN_KEY_BYTES: Final = 32
# A wake ends by fencing. The expiry only limits the value of a leaked token, and must be longer than a worker
# may extend its lease by heartbeats.
TOKEN_LIFETIME_MS: Final = 24 * 3600 * 1000
TOKEN_BYTES_MAX: Final = 1024
_TOKEN_CONTEXT: Final = b"tailrace wake token 1\n"


class WakeToken(msgspec.Struct, frozen=True, array_like=True):
    subscription: str
    generation: int
    expires_ms: int


def new_token_key() -> bytes:
    return secrets.token_bytes(TOKEN_KEY_BYTES)


def issue_wake_token(key: bytes, subscription: str, generation: int, now_ms: int) -> str:
    payload = msgspec.msgpack.encode(WakeToken(subscription, generation, now_ms + TOKEN_LIFETIME_MS))
    return f"{_base64url(payload)}.{_base64url(_token_mac(key, payload))}"


def read_wake_token(key: bytes, token: bytes, subscription: str) -> WakeToken:
    """The content of a valid token for this subscription. The caller checks expiry, after fencing."""
    payload_text, _, mac_text = token.partition(b".")
    try:
        if len(token) > TOKEN_BYTES_MAX:
            raise invalid_wake_token()
        payload, mac = _decode_base64url(payload_text), _decode_base64url(mac_text)
    except (binascii.Error, ValueError):
        raise invalid_wake_token() from None
    if not hmac.compare_digest(mac, _token_mac(key, payload)):
        raise invalid_wake_token()
    content = msgspec.msgpack.decode(payload, type=WakeToken)
    if content.subscription != subscription:
        raise invalid_wake_token()
    return content


def read_bearer_token(key: bytes, authorization: bytes | None, subscription: str) -> WakeToken:
    """As `read_wake_token`, from an Authorization header; tokens elsewhere are not accepted."""
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        raise invalid_wake_token("send the wake token in the Authorization header: Bearer <token>")
    return read_wake_token(key, token.strip(b" "), subscription)


def invalid_wake_token(reason: str = "invalid wake token for this subscription") -> TailraceError:
    return TailraceError(
        "TOKEN_INVALID", reason, headers=(("WWW-Authenticate", 'Bearer realm="tailrace-wake"'),)
    )


def expired_wake_token() -> TailraceError:
    return TailraceError(
        "TOKEN_EXPIRED",
        "the wake token has expired; the next wake has a new one",
        headers=(("WWW-Authenticate", 'Bearer realm="tailrace-wake", error="invalid_token"'),),
    )


def _token_mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _TOKEN_CONTEXT + payload, hashlib.sha256)


def _decode_base64url(text: bytes) -> bytes:
    # Strict: each token has one valid encoding.
    raw = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _base64url(raw).encode() != text:
        raise ValueError("not canonical")
    return raw


logger = logging.getLogger("tailrace.subscriptions")

# The prefix marks records that must not be shown by inspection commands.
SIGNING_KEYS_RECORD: Final = "secret/webhook-keys"
TOKEN_KEY_RECORD: Final = "secret/wake-token-key"  # noqa: S105 (the name of a record)
# The wall clock may be changed while a timer runs, so timers are short.
TIMER_S_MAX: Final = 3600.0
RETRY_S: Final = 5.0


class ServerKeys:
    """The server's own keys. Nothing is signed with a key that is not durable: a crash could lose it."""

    def __init__(self, log: Log, clock: Clock, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        self._log = log
        self._clock = clock
        self._loop = loop
        self._age_ms_max = settings.limits.webhook_key_ms
        self._since_ms = settings.webhook_keys_since_ms
        self._ring: WebhookKeyRing | None = None
        self._token_key: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def load(self) -> None:
        meta = self._log.streams.meta
        saved, token_key = meta.get(SIGNING_KEYS_RECORD), meta.get(TOKEN_KEY_RECORD)
        if saved is None or token_key is None:
            if self._log.refusal is None:
                self._create()
            return
        self._token_key = token_key
        ring = decode_key_ring(saved)
        trusted = ring.created_since(self._since_ms)
        if trusted is ring:
            self._ring = ring
            self.rotate()
        else:
            logger.warning("discarding webhook keys created before webhook_keys_since")
            self._replace(trusted or new_key_ring(self._now_ms()))

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def current(self) -> WebhookKey:
        """The key that signs now."""
        return self._saved_ring().current(self._now_ms())

    @property
    def token_key(self) -> bytes:
        if self._token_key is None:
            raise self._keys_unavailable()
        return self._token_key

    def jwks(self) -> bytes:
        return self._saved_ring().jwks(self._now_ms())

    def rotate(self) -> None:
        """Publish the next key and drop unneeded ones when due, then wait for the next change."""
        ring = self._saved_ring()
        changed = ring.changed(self._now_ms(), self._age_ms_max)
        if changed is None:
            delay_s = (ring.changes_at_ms(self._age_ms_max) - self._now_ms()) / 1000
            self._wait(min(max(delay_s, 0.0), TIMER_S_MAX), self.rotate)
        else:
            self._save(changed, self.rotate)

    def _replace(self, ring: WebhookKeyRing) -> None:
        """Replace the ring. Until the new one is saved there is none: the old one must not be used."""
        self._save(ring, lambda: self._replace(ring))

    def _save(self, ring: WebhookKeyRing, again: Callable[[], None]) -> None:
        def saved(_: Transaction, error: TailraceError | None) -> None:
            if error is not None:
                self._wait(RETRY_S, again)
                return
            self._ring = ring
            logger.info("webhook signing key changed", extra=log_fields(kid=self.current().kid))
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

    def _create(self) -> None:
        ring, token_key = new_key_ring(self._now_ms()), new_token_key()

        def saved(_: Transaction, error: TailraceError | None) -> None:
            if error is None and self._ring is None:
                self._ring, self._token_key = ring, token_key
                self.rotate()

        self._log.put_metas([(SIGNING_KEYS_RECORD, ring.encode()), (TOKEN_KEY_RECORD, token_key)], saved)

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def _saved_ring(self) -> WebhookKeyRing:
        if self._ring is None:
            raise self._keys_unavailable()
        return self._ring

    def _keys_unavailable(self) -> TailraceError:
        """The disk was full when the server started. Creating keys is retried whenever one is needed."""
        if SIGNING_KEYS_RECORD not in self._log.streams.meta and self._log.refusal is None:
            self._create()
        return TailraceError("unavailable", "the server's signing keys are not saved yet, retry later")
