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
# A receiver may accept a signature for this long, so a retired key has to be known for as long.
REPLAY_WINDOW_MS: Final = 5 * 60 * 1000


class SavedKey(msgspec.Struct, frozen=True, array_like=True):
    """A private key as it is kept: never shown, never logged."""

    seed: bytes
    created_ms: int
    retired_ms: int | None = None


class SigningKey:
    """A key in use: its id, its public form, and signatures."""

    __slots__ = ("_private", "jwk", "kid", "saved")

    def __init__(self, saved: SavedKey) -> None:
        assert len(saved.seed) == SEED_BYTES
        self.saved = saved
        self._private = Ed25519PrivateKey.from_private_bytes(saved.seed)
        x = _base64url(self._private.public_key().public_bytes_raw())
        # RFC 7638: the hash of the required members in this order.
        thumbprint = hashlib.sha256(orjson.dumps({"crv": "Ed25519", "kty": "OKP", "x": x})).digest()
        self.kid = f"ds_{_base64url(thumbprint)}"
        self.jwk = {"kty": "OKP", "crv": "Ed25519", "kid": self.kid, "use": "sig", "alg": "EdDSA", "x": x}

    def sign(self, body: bytes, now_ms: int) -> str:
        """The Webhook-Signature header for a body."""
        moment_s = now_ms // 1000
        signature = self._private.sign(b"%d.%b" % (moment_s, body))
        return f"t={moment_s},kid={self.kid},ed25519={_base64url(signature)}"


class KeyRing:
    """The key that signs, and retired ones that still verify. Changes are saved before they are used."""

    __slots__ = ("_keys",)

    def __init__(self, keys: tuple[SavedKey, ...]) -> None:
        assert keys[0].retired_ms is None, "the first key is the one that signs"
        self._keys = tuple(SigningKey(saved) for saved in keys)

    @property
    def current(self) -> SigningKey:
        return self._keys[0]

    def jwks(self, now_ms: int) -> bytes:
        return orjson.dumps({"keys": [key.jwk for key in self._keys if _known(key.saved, now_ms)]})

    def rotated(self, now_ms: int) -> KeyRing:
        """A ring with a new key in front; keys whose signatures nobody accepts any more are gone."""
        retired = tuple(
            SavedKey(key.saved.seed, key.saved.created_ms, key.saved.retired_ms or now_ms)
            for key in self._keys
        )
        kept = tuple(saved for saved in retired if _known(saved, now_ms))
        return KeyRing((new_key(now_ms), *kept))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode([key.saved for key in self._keys])


def new_key(now_ms: int) -> SavedKey:
    return SavedKey(secrets.token_bytes(SEED_BYTES), now_ms)


def new_ring(now_ms: int) -> KeyRing:
    return KeyRing((new_key(now_ms),))


def decode_ring(saved: bytes) -> KeyRing:
    return KeyRing(tuple(msgspec.msgpack.decode(saved, type=list[SavedKey])))


def _known(saved: SavedKey, now_ms: int) -> bool:
    return saved.retired_ms is None or now_ms - saved.retired_ms < REPLAY_WINDOW_MS


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
