from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tailrace.subscriptions.signing import REPLAY_WINDOW_MS, decode_ring, new_ring

NOW_MS = 1_767_225_600_123


def unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_a_signature_verifies_with_the_published_key() -> None:
    ring = new_ring(NOW_MS)
    body = b'{"subscription_id":"s1"}'
    header = ring.current.sign(body, NOW_MS)
    match = re.fullmatch(r"t=(\d+),kid=(ds_[A-Za-z0-9_-]+),ed25519=([A-Za-z0-9_-]+)", header)
    assert match is not None
    assert match[1] == "1767225600"
    (jwk,) = json.loads(ring.jwks(NOW_MS))["keys"]
    assert jwk["kid"] == match[2] == ring.current.kid
    assert {name: jwk[name] for name in ("kty", "crv", "use", "alg")} == {
        "kty": "OKP",
        "crv": "Ed25519",
        "use": "sig",
        "alg": "EdDSA",
    }
    assert "d" not in jwk
    public = Ed25519PublicKey.from_public_bytes(unpadded(jwk["x"]))
    public.verify(unpadded(match[3]), f"{match[1]}.".encode() + body)
    with pytest.raises(InvalidSignature):
        public.verify(unpadded(match[3]), f"{int(match[1]) + 1}.".encode() + body)
    thumbprint = hashlib.sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{jwk["x"]}"}}'.encode()).digest()
    assert unpadded(jwk["kid"].removeprefix("ds_")) == thumbprint


def test_keys_survive_saving() -> None:
    ring = new_ring(NOW_MS).rotated(NOW_MS + 1)
    again = decode_ring(ring.encode())
    assert again.current.kid == ring.current.kid
    assert again.jwks(NOW_MS) == ring.jwks(NOW_MS)
    assert again.current.sign(b"x", NOW_MS) == ring.current.sign(b"x", NOW_MS)


def test_a_retired_key_is_known_until_its_signatures_are_too_old() -> None:
    first = new_ring(NOW_MS)
    second = first.rotated(NOW_MS)
    assert second.current.kid != first.current.kid

    def kids(now_ms: int) -> list[str]:
        return [key["kid"] for key in json.loads(second.jwks(now_ms))["keys"]]

    assert kids(NOW_MS + REPLAY_WINDOW_MS - 1) == [second.current.kid, first.current.kid]
    assert kids(NOW_MS + REPLAY_WINDOW_MS) == [second.current.kid]
    third = second.rotated(NOW_MS + REPLAY_WINDOW_MS)
    assert len(json.loads(third.jwks(NOW_MS + REPLAY_WINDOW_MS))["keys"]) == 2
