"""What another worker refused with, to be said again here."""

from __future__ import annotations

import msgspec

from tailrace.common.errors import TailraceError


class PeerError(msgspec.Struct):
    """The part of an error's body that matters here."""

    code: str
    message: str


def decode_peer_error(answer: bytes) -> TailraceError:
    error = msgspec.json.decode(answer, type=dict[str, PeerError])["error"]
    return TailraceError(error.code, error.message)
