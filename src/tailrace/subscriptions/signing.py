"""Webhook signatures: Ed25519 keys, their public set, and the Webhook-Signature header."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Final

import msgspec
import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
