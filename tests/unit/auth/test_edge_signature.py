"""E-20: what an edge says about its client is believed only as it was signed, and not for long."""

from __future__ import annotations

import pytest

from tailrace.auth import EdgeSignature, ForwardedClient

KEY = "a key that an edge and its server have in common"
NOW_S = 1_700_000_000.0
TARGET = b"/v1/stream/a%20b?offset=-1&key=x"
WHO = ForwardedClient("0badcafe", "192.0.2.7", "somebody; sig=else, ü")


@pytest.fixture
def mark() -> EdgeSignature:
    return EdgeSignature(KEY)


def test_what_was_signed_is_read_again(mark: EdgeSignature) -> None:
    value = mark.sign(b"GET", TARGET, WHO, NOW_S)
    assert value.startswith(b"v1;id=0badcafe;t=1700000000;ip=192.0.2.7;sub=")
    for seconds in (-60, 0, 59):
        assert mark.verify(value, b"GET", TARGET, NOW_S + seconds) == WHO
    plain = ForwardedClient("e", "2001:db8::1", "")
    assert mark.verify(mark.sign(b"PUT", b"/", plain, NOW_S), b"PUT", b"/", NOW_S) == plain


def test_nothing_else_is(mark: EdgeSignature) -> None:
    value = mark.sign(b"GET", TARGET, WHO, NOW_S)
    assert mark.verify(value, b"POST", TARGET, NOW_S) is None
    assert mark.verify(value, b"GET", b"/v1/stream/a%20c?offset=-1&key=x", NOW_S) is None
    assert mark.verify(value, b"GET", TARGET + b"&more=1", NOW_S) is None
    assert mark.verify(value, b"GET", TARGET, NOW_S + 61) is None
    assert mark.verify(value, b"GET", TARGET, NOW_S - 61) is None
    assert EdgeSignature(KEY + ".").verify(value, b"GET", TARGET, NOW_S) is None
    for position in range(len(value)):
        changed = value[:position] + bytes([value[position] ^ 1]) + value[position + 1 :]
        assert mark.verify(changed, b"GET", TARGET, NOW_S) is None, changed
    for rubbish in (b"", b"v1", b";sig=", b"v1;id=a;sig=", value + b"," + value, value * 20):
        assert mark.verify(rubbish, b"GET", TARGET, NOW_S) is None


def test_a_long_name_is_cut(mark: EdgeSignature) -> None:
    long = mark.sign(b"GET", b"/", ForwardedClient("e", "::1", "ü" * 5000), NOW_S)
    found = mark.verify(long, b"GET", b"/", NOW_S)
    assert found is not None
    assert found.sub == "ü" * 128
