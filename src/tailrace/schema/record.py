"""Stored records as values and back; what a lens leaves alone keeps its meaning to the last digit."""

from __future__ import annotations

import json
import math

import msgspec

_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


class UnusableRecordError(ValueError):
    """The text is JSON, but no value of ours can carry it."""


def decode_json_record(payload: bytes | memoryview) -> object:
    """The value of a JSON text that is known to be well-formed.

    Half a surrogate pair, escaped, is legal JSON; msgspec refuses it, so the slower reader steps in.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        return json.loads(bytes(payload), parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise UnusableRecordError("it is nested too deeply") from None
    except ValueError:
        raise UnusableRecordError("it holds a number out of range") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def encode_json_record(value: object) -> bytes:
    """The value as compact JSON."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        # Half a surrogate pair has no UTF-8; as an escape it comes back as it was sent.
        return _dump_escaped(value)


def _dump_escaped(value: object) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        # An infinity is no JSON; the quick writer says null, so does this one.
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":")).encode()


def without_surrogates(value: object) -> object:
    """The same value with every half of a surrogate pair replaced by U+FFFD."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return json.loads(text.decode("utf-16-le", "replace"))
