"""Signatures of messages, and the canonical form that one of them signs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.hub import envelope
from tailrace.hub.errors import HubError
from tailrace.hub.signatures import (
    RETIRED_VALID_MS,
    VALID_MS,
    SignatureKey,
    canonical_json,
    compute_signature,
    format_number,
    sign_frame,
    verify_signature,
)

NOW_MS = 1_767_225_600_000
SECRET = bytes(range(32))
KEY = SignatureKey("k1", SECRET, NOW_MS)
FRAME = envelope.encode_envelope(
    id="0197f3c2-5a10-7c44-9b1e-0d5f6a7b8c90",
    from_="@(browser/widget-1)",
    to=envelope.HUB_ADDRESS,
    type="hub:send",
    payload=b'{"to":"@(a)","type":"t","data":{"n":1.0,"s":"\\u00e4"}}',
    timestamp=NOW_MS,
    metadata=b'{"b":1,"a":2}',
    ttl=30_000,
)


def passes(frame: bytes, signature: str, key: SignatureKey = KEY, now_ms: int = NOW_MS) -> bool:
    try:
        verify_signature(frame, signature, [key], now_ms)
    except HubError as refused:
        error = refused
    else:
        return True
    assert error.code == "invalid_signature"
    return False


def test_the_first_version_signs_the_members_as_they_are_written() -> None:
    content = FRAME.removesuffix(b',"signature":null}') + b"}"
    mac = base64.b64encode(hmac.new(SECRET, content, hashlib.sha256).digest()).decode()
    assert compute_signature(FRAME, SECRET) == mac
    assert passes(FRAME, mac)
    # The order and the space of the frame do not matter, the spelling of its values does not change.
    found = json.loads(FRAME)
    moved = b'{ "payload" : ' + bytes(envelope.parse_envelope(FRAME).payload)
    for name in ("ttl", "id", "from", "to", "type", "pattern", "correlationId", "timestamp", "metadata"):
        moved += b' , "%b" : ' % name.encode() + json.dumps(found[name], separators=(" , ", " : ")).encode()
    assert passes(moved + b"}", mac)


def test_the_second_version_signs_the_canonical_form() -> None:
    content = {**json.loads(FRAME)}
    del content["signature"]
    content["payload"]["data"]["n"] = 1
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    mac = base64.b64encode(hmac.new(SECRET, text, hashlib.sha256).digest()).decode()
    assert compute_signature(FRAME, SECRET, "k1") == f"v2:k1:{mac}"
    assert passes(json.dumps(json.loads(FRAME), indent=1).encode(), f"v2:k1:{mac}")
    assert not passes(FRAME, f"v2:k2:{mac}")


@pytest.mark.parametrize("key_id", [None, "k1"])
@given(position=st.integers(min_value=0), value=st.integers(0, 255))
def test_h13_no_byte_can_be_changed(key_id: str | None, position: int, value: int) -> None:
    signature = compute_signature(FRAME, SECRET, key_id)
    changed = bytearray(FRAME)
    # What comes after the signed members is the signature itself.
    at = position % FRAME.index(b',"signature"')
    if changed[at] == value:
        return
    changed[at] = value
    try:
        before, after = envelope.parse_envelope(FRAME), envelope.parse_envelope(bytes(changed))
    except HubError:
        return
    same = all(getattr(before, name) == getattr(after, name) for name in before.__struct_fields__[:4])
    if passes(bytes(changed), signature):
        # Another spelling of the same values, which the canonical form does not see.
        assert same
        assert json.loads(FRAME) == {**json.loads(changed), "signature": None}


def test_h13_a_signed_frame_carries_its_signature() -> None:
    for key_id in (None, "k1"):
        frame = sign_frame(FRAME, SECRET, key_id)
        signature = envelope.parse_envelope(frame).signature
        assert signature is not None
        assert passes(frame, signature)
        assert not passes(frame.replace(b"1.0", b"2.0"), signature)


def test_keys_age() -> None:
    signature = compute_signature(FRAME, SECRET)
    assert passes(FRAME, signature, now_ms=NOW_MS + VALID_MS - 1)
    assert not passes(FRAME, signature, now_ms=NOW_MS + VALID_MS)
    retired = SignatureKey("k0", SECRET, NOW_MS, retired_ms=NOW_MS + 5)
    assert passes(FRAME, signature, retired, NOW_MS + 5 + RETIRED_VALID_MS - 1)
    assert not passes(FRAME, signature, retired, NOW_MS + 5 + RETIRED_VALID_MS)
    assert "secret" not in repr(KEY)
    assert str(SECRET) not in repr(KEY)


@pytest.mark.parametrize("signature", ["", "not base64", "v2:", "v2:abc", "v2:k1:?", "AAAA", "ä"])
def test_improper_signatures_are_refused(signature: str) -> None:
    assert not passes(FRAME, signature)


# -- the canonical form


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
    ],
)
def test_numbers_are_written_as_ecmascript_does(bits: str, text: str) -> None:
    """Samples of RFC 8785, appendix B."""
    assert format_number(struct.unpack(">d", bytes.fromhex(bits))[0]) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_written_number_is_the_same_number(value: float) -> None:
    assert float(format_number(value)) == value


def test_names_are_sorted_as_utf16_and_strings_have_few_escapes() -> None:
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    value = dict.fromkeys(names, '€$\x0f\nA\'B"\\\\"/')
    written = canonical_json(json.dumps(value).encode())
    assert list(json.loads(written)) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'.encode() in written
    assert json.loads(written) == value


@pytest.mark.parametrize("text", [b'{"a":1,"a":2}', b"1e400", b"NaN", b'"\\ud800"', b"{", b""])
def test_what_has_no_canonical_form_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        canonical_json(text)
