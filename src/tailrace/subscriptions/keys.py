"""Webhook signing keys with rotation and JWKS, and wake tokens.

Webhook signatures: Ed25519 keys, their public set, and the Webhook-Signature header.

Callback tokens: what a worker shows to answer a wake. Signed, good for one subscription and generation.

The server's own keys: those that sign webhooks, and one for callback tokens. They are kept in the log.
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
from tailrace.common.settings import Settings
from tailrace.log.log import Log
from tailrace.log.transaction import Transaction

SEED_BYTES: Final = 32
# How long whoever fetched the public keys may go on using them without asking again.
JWKS_CACHE_S: Final = 300
# A receiver may accept a signature for this long, so a retired key has to be known for as long.
REPLAY_WINDOW_MS: Final = 5 * 60 * 1000
# Public this long before it signs: by then no copy of the key set is in use that lacks it.
ANNOUNCED_MS: Final = 2 * JWKS_CACHE_S * 1000
# A receiver whose clock is a little behind accepts an old signature a little longer.
CLOCK_SKEW_MS: Final = 60 * 1000


class StoredWebhookKey(msgspec.Struct, frozen=True, array_like=True):
    """A private key as it is kept: never shown, never logged."""

    seed: bytes
    created_ms: int
    signs_ms: int | None = None  # when it begins to sign, if not at once


class WebhookKey:
    """A key in use: its id, its public form, and signatures."""

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
    """The keys of a server, the oldest first: retired ones, the one that signs, and at times the next.

    Which one signs follows from the time alone. A key's signatures all bear times before the moment at which
    the next one takes over. That moment is saved beforehand, and also says when nobody needs the old key.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: tuple[StoredWebhookKey, ...]) -> None:
        assert keys, "a server has a key"
        self._keys = tuple(WebhookKey(saved) for saved in keys)
        moments = [key.signs_ms for key in self._keys]
        assert moments == sorted(moments), "keys take over in order"

    def current(self, now_ms: int) -> WebhookKey:
        """The key that signs now. With a clock that was set back, the oldest one left."""
        return self._keys[self._position(now_ms)]

    def jwks(self, now_ms: int) -> bytes:
        """The public keys, the one that signs first."""
        position = self._position(now_ms)
        listed = (self._keys[position], *self._keys[position + 1 :], *self._keys[:position])
        needed = self._needed(now_ms)
        return orjson.dumps({"keys": [key.jwk for key in listed if key in needed]})

    def changed(self, now_ms: int, age_ms_max: int) -> WebhookKeyRing | None:
        """The ring with what is due now: the next key announced, keys that nobody needs gone."""
        keys = [key.saved for key in self._needed(now_ms)]
        retires_ms = self._keys[-1].signs_ms + age_ms_max
        if now_ms >= retires_ms - ANNOUNCED_MS:
            keys.append(StoredWebhookKey(_new_seed(), now_ms, max(retires_ms, now_ms + ANNOUNCED_MS)))
        elif len(keys) == len(self._keys):
            return None
        return WebhookKeyRing(tuple(keys))

    def made_since(self, since_ms: int) -> WebhookKeyRing | None:
        """The ring without keys that are older: itself if none is, None if all are."""
        kept = tuple(key.saved for key in self._keys if key.saved.created_ms >= since_ms)
        if len(kept) == len(self._keys):
            return self
        return WebhookKeyRing(kept) if kept else None

    def changes_at_ms(self, age_ms_max: int) -> int:
        """When `changed` has something to do."""
        announce_ms = self._keys[-1].signs_ms + age_ms_max - ANNOUNCED_MS
        return announce_ms if len(self._keys) == 1 else min(announce_ms, self._forgotten_at_ms(1))

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
            if position == last or now_ms < self._forgotten_at_ms(position + 1)
        ]

    def _forgotten_at_ms(self, successor: int) -> int:
        """When the key before this one is of no use to anybody."""
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
# Fencing by generation is what ends a wake. The expiry only bounds how long a leaked token means anything,
# and has to outlast a worker that keeps its lease by heartbeats.
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
    return f"{_encode(payload)}.{_encode(_token_mac(key, payload))}"


def read_wake_token(key: bytes, token: bytes, subscription: str) -> WakeToken:
    """The token's content if it is genuine for this subscription. Expiry is for the caller, after fencing."""
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
    """As `read`, from an Authorization header: a token anywhere else does not count."""
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        raise invalid_wake_token("the wake's token belongs in the Authorization header: Bearer <token>")
    return read_wake_token(key, token.strip(b" "), subscription)


def invalid_wake_token(reason: str = "the token is not one of this subscription's") -> TailraceError:
    return TailraceError(
        "TOKEN_INVALID", reason, headers=(("WWW-Authenticate", 'Bearer realm="tailrace-wake"'),)
    )


def expired_wake_token() -> TailraceError:
    return TailraceError(
        "TOKEN_EXPIRED",
        "the token has expired; the next wake brings a new one",
        headers=(("WWW-Authenticate", 'Bearer realm="tailrace-wake", error="invalid_token"'),),
    )


def _token_mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _TOKEN_CONTEXT + payload, hashlib.sha256)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode_base64url(text: bytes) -> bytes:
    # Strict: one token has one spelling.
    raw = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _encode(raw).encode() != text:
        raise ValueError("not canonical")
    return raw


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
        self._ring: WebhookKeyRing | None = None
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
        ring = decode_key_ring(saved)
        trusted = ring.made_since(self._since_ms)
        if trusted is ring:
            self._ring = ring
            self.rotate()
        else:
            logger.warning("webhook keys made before webhook_keys_since are given up")
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

    def _replace(self, ring: WebhookKeyRing) -> None:
        """Until this ring is saved there is none: what it replaces is not to be used."""
        self._save(ring, lambda: self._replace(ring))

    def _save(self, ring: WebhookKeyRing, again: Callable[[], None]) -> None:
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
            raise self._missing()
        return self._ring

    def _missing(self) -> TailraceError:
        """The disk was full when the server started. Making keys is tried again whenever one is needed."""
        if SIGNING_KEYS_RECORD not in self._log.streams.meta and self._log.refusal is None:
            self._make()
        return TailraceError("unavailable", "the server's signing keys are not saved yet")
