"""Tokens: signed by the newest key, good for a while after it has changed, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.watch.resume_tokens import (
    KEYS_MAX,
    KeyRing,
    ResumePosition,
    Ticket,
    TokenSigner,
    decode_key_ring,
    encode_key_ring,
)

HOUR_MS = 3_600_000
POSITION = ResumePosition("app", "orders", 4, b"q" * 16, [1, 0, 2**40])


def signer(ring: KeyRing, now_ms: int = 0, verify_ms: int = HOUR_MS) -> TokenSigner:
    return TokenSigner(ring, verify_ms, lambda: now_ms)


def test_w27_w28_a_token_outlives_the_change_of_its_key_for_a_while() -> None:
    ring = KeyRing.first(0)
    token = signer(ring).position(POSITION)
    assert signer(ring).read_position(token) == POSITION
    later = ring.rotated(1000, HOUR_MS)
    assert len(later.keys) == 2
    assert signer(later, 1000).read_position(token) == POSITION
    assert signer(later, 1000 + HOUR_MS - 1).read_position(token) == POSITION
    assert signer(later, 1000 + HOUR_MS).read_position(token) is None
    fresh = signer(later).position(POSITION)
    assert fresh != token
    assert signer(ring).read_position(fresh) is None, "nobody knew that key then"
    assert signer(decode_key_ring(encode_key_ring(later))).read_position(fresh) == POSITION


def test_keys_are_renewed_when_it_is_time_and_forgotten_when_they_are_over() -> None:
    ring = KeyRing.first(0)
    assert not ring.is_due(HOUR_MS - 1, HOUR_MS)
    assert ring.is_due(HOUR_MS, HOUR_MS)
    for turn in range(1, 600):
        ring = ring.rotated(turn * HOUR_MS, 3 * HOUR_MS)
        assert len(ring.keys) <= 4
    crowded = KeyRing.first(0)
    for turn in range(1, 20):
        crowded = crowded.rotated(turn, HOUR_MS)
    assert len(crowded.keys) == KEYS_MAX
    assert len({key.id for key in crowded.keys}) == KEYS_MAX


@given(st.binary(max_size=60) | st.text(max_size=60), st.integers(0, 400), st.integers(0, 255))
def test_w28_whatever_was_not_signed_is_nothing(noise: bytes | str, place: int, other: int) -> None:
    one = signer(KeyRing.first(0))
    assert one.read_position(noise if isinstance(noise, str) else noise.hex()) is None
    token = one.position(POSITION)
    place %= len(token)
    changed = token[:place] + chr(other) + token[place + 1 :]
    found = one.read_position(changed)
    assert found is None or found == POSITION, "the last bits of base64 may say nothing"
    assert one.read_ticket(token) is None, "a position is no ticket"
    ticket = Ticket(1.0, "ada", ["read"], None, False, b"{}", None, b"{}")
    assert one.read_ticket(one.ticket(ticket)) == ticket
    assert one.read_position(one.ticket(ticket)) is None
