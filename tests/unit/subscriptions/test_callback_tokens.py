from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.subscriptions import keys

KEY = keys.new_token_key()
NOW_MS = 1_767_225_600_000


def test_round_trip() -> None:
    token = keys.issue_wake_token(KEY, "sub/ü", 7, NOW_MS)
    content = keys.read_wake_token(KEY, token.encode(), "sub/ü")
    assert content.generation == 7
    assert content.expires_ms == NOW_MS + keys.TOKEN_LIFETIME_MS
    assert keys.read_bearer_token(KEY, b"bearer  " + token.encode(), "sub/ü") == content


def assert_invalid(token: bytes, subscription: str = "s1") -> None:
    with pytest.raises(TailraceError) as caught:
        keys.read_wake_token(KEY, token, subscription)
    assert caught.value.code == "TOKEN_INVALID"
    assert caught.value.status == 401


def test_a_token_is_for_one_subscription_and_one_key() -> None:
    token = keys.issue_wake_token(KEY, "s1", 1, NOW_MS).encode()
    assert_invalid(token, "s2")
    with pytest.raises(TailraceError):
        keys.read_wake_token(keys.new_token_key(), token, "s1")


@given(st.integers(min_value=0), st.integers(min_value=0, max_value=255))
def test_no_byte_can_be_changed(position: int, value: int) -> None:
    token = bytearray(keys.issue_wake_token(KEY, "s1", 3, NOW_MS).encode())
    at = position % len(token)
    if token[at] == value:
        return
    token[at] = value
    assert_invalid(bytes(token))


@given(st.binary(max_size=64))
def test_garbage(token: bytes) -> None:
    assert_invalid(token)


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Basic x", b"Bearer x.y", b"Bearer " + b"a" * 5000]
)
def test_headers_without_a_token(header: bytes | None) -> None:
    with pytest.raises(TailraceError) as caught:
        keys.read_bearer_token(KEY, header, "s1")
    assert caught.value.code == "TOKEN_INVALID"
    assert "WWW-Authenticate" in dict(caught.value.headers)
