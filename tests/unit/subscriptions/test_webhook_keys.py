from __future__ import annotations

import base64
import hashlib
import json
import re

import msgspec
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.subscriptions.keys import (
    ANNOUNCED_MS,
    CLOCK_SKEW_MS,
    REPLAY_WINDOW_MS,
    WebhookKeyRing,
    decode_key_ring,
    new_key_ring,
)

NOW_MS = 1_767_225_600_123
AGE_MS = 24 * 3600 * 1000
SWITCH_MS = NOW_MS + AGE_MS
FORGOTTEN_MS = SWITCH_MS + REPLAY_WINDOW_MS + CLOCK_SKEW_MS


def unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_a_signature_verifies_with_the_published_key() -> None:
    ring = new_key_ring(NOW_MS)
    body = b'{"subscription_id":"s1"}'
    header = ring.current(NOW_MS).sign(body, NOW_MS)
    match = re.fullmatch(r"t=(\d+),kid=(ds_[A-Za-z0-9_-]+),ed25519=([A-Za-z0-9_-]+)", header)
    assert match is not None
    assert match[1] == "1767225600"
    (jwk,) = json.loads(ring.jwks(NOW_MS))["keys"]
    assert jwk["kid"] == match[2] == ring.current(NOW_MS).kid
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


def announced(ring: WebhookKeyRing, now_ms: int) -> WebhookKeyRing:
    changed = ring.changed(now_ms, AGE_MS)
    assert changed is not None
    return changed


def kids(ring: WebhookKeyRing, now_ms: int) -> list[str]:
    return [key["kid"] for key in json.loads(ring.jwks(now_ms))["keys"]]


def test_keys_survive_saving() -> None:
    ring = announced(new_key_ring(NOW_MS), SWITCH_MS)
    again = decode_key_ring(ring.encode())
    for now_ms in (NOW_MS, SWITCH_MS, SWITCH_MS + ANNOUNCED_MS):
        assert again.current(now_ms).kid == ring.current(now_ms).kid
        assert again.jwks(now_ms) == ring.jwks(now_ms)
        assert again.current(now_ms).sign(b"x", now_ms) == ring.current(now_ms).sign(b"x", now_ms)


def test_a_ring_that_was_saved_before_keys_had_a_beginning_is_read() -> None:
    ring = decode_key_ring(msgspec.msgpack.encode([[bytes(32), NOW_MS, None]]))
    assert ring.current(NOW_MS).signs_ms == NOW_MS


def test_the_next_key_is_public_before_it_signs_and_the_last_one_after_it_signed() -> None:
    first = new_key_ring(NOW_MS)
    announce_ms = SWITCH_MS - ANNOUNCED_MS
    assert first.changes_at_ms(AGE_MS) == announce_ms
    assert first.changed(announce_ms - 1, AGE_MS) is None
    ring = announced(first, announce_ms)
    old, new = first.current(NOW_MS).kid, ring.current(SWITCH_MS).kid
    assert old != new
    assert ring.current(announce_ms).kid == ring.current(SWITCH_MS - 1).kid == old
    assert kids(ring, announce_ms) == kids(ring, SWITCH_MS - 1) == [old, new]
    assert kids(ring, SWITCH_MS) == kids(ring, FORGOTTEN_MS - 1) == [new, old]
    assert kids(ring, FORGOTTEN_MS) == [new]


def test_a_key_that_nobody_needs_is_not_kept() -> None:
    ring = announced(new_key_ring(NOW_MS), SWITCH_MS - ANNOUNCED_MS)
    assert ring.changes_at_ms(AGE_MS) == FORGOTTEN_MS
    assert ring.changed(FORGOTTEN_MS - 1, AGE_MS) is None
    tidied = announced(ring, FORGOTTEN_MS)
    assert tidied.current(FORGOTTEN_MS).kid == ring.current(FORGOTTEN_MS).kid
    assert len(msgspec.msgpack.decode(tidied.encode())) == 1
    assert tidied.changes_at_ms(AGE_MS) == SWITCH_MS + AGE_MS - ANNOUNCED_MS


def test_a_server_that_slept_through_it_announces_before_it_switches() -> None:
    late_ms = SWITCH_MS + 100 * AGE_MS
    first = new_key_ring(NOW_MS)
    ring = announced(first, late_ms)
    old = first.current(NOW_MS).kid
    assert ring.current(late_ms + ANNOUNCED_MS - 1).kid == old
    assert ring.current(late_ms + ANNOUNCED_MS).kid != old
    assert len(kids(ring, late_ms)) == 2


def test_a_clock_that_is_set_back_finds_a_key() -> None:
    ring = announced(new_key_ring(NOW_MS), SWITCH_MS)
    assert ring.current(0).kid == ring.current(NOW_MS).kid
    assert len(kids(ring, 0)) == 2


@settings(deadline=None)
@given(steps=st.lists(st.integers(1, AGE_MS // 2), min_size=1, max_size=30))
def test_whatever_was_signed_verifies_as_long_as_it_counts(steps: list[int]) -> None:
    """The receiver has a copy of the set as old as it may be; what it lacks, it may fetch."""
    ring, now_ms = new_key_ring(NOW_MS), NOW_MS
    signed: list[tuple[int, str]] = []
    copies = [(now_ms, set(kids(ring, now_ms)))]
    for step in steps:
        now_ms += step
        due = ring.changed(now_ms, AGE_MS)
        ring = due if due is not None else ring
        published = set(kids(ring, now_ms))
        copies.append((now_ms, published))
        current = ring.current(now_ms).kid
        assert all(current in known for at_ms, known in copies if now_ms - at_ms <= ANNOUNCED_MS // 2)
        signed.append((now_ms, current))
        assert {kid for at_ms, kid in signed if now_ms - at_ms <= REPLAY_WINDOW_MS} <= published
        assert len(published) <= 3


def test_keys_that_may_have_leaked_are_given_up() -> None:
    first = new_key_ring(NOW_MS)
    ring = announced(first, SWITCH_MS)
    assert ring.created_since(0) is ring
    assert ring.created_since(NOW_MS) is ring
    rest = ring.created_since(NOW_MS + 1)
    assert rest is not None
    # The key that was announced is all there is, so it signs at once.
    assert kids(rest, SWITCH_MS) == [ring.current(SWITCH_MS + ANNOUNCED_MS).kid]
    assert ring.created_since(SWITCH_MS + 1) is None
