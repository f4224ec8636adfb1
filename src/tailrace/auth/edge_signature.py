"""The header by which an edge tells its server for whom it asks.

`v1;id=<edge>;t=<seconds>;ip=<client>;sub=<identity>;sig=<HMAC-SHA256, base64url>`, signed with a key that
both have, over the request and the fields before the signature. It grants nothing: it names a client for rate
limits and for the log.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

EDGE_HEADER: Final = b"tailrace-edge"
# How far the clocks of an edge and its server may be apart, and how long a header that was seen is of use.
SIGNATURE_AGE_S_MAX: Final = 60
SUB_CHARS_MAX: Final = 128
VALUE_BYTES_MAX: Final = 1024
_FIELDS: Final = (b"id", b"t", b"ip", b"sub")


class ForwardedClient(NamedTuple):
    """A client as an edge has seen it."""

    edge_id: str
    ip: str
    sub: str  # empty if it has no name, or the edge could not check its token


class EdgeSignature:
    """Makes and checks the header."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def make(self, method: bytes, target: bytes, vouched: ForwardedClient, now_s: float) -> bytes:
        """The value for one request; `target` is its path and query."""
        sub = quote(vouched.sub[:SUB_CHARS_MAX], safe="")
        ip = quote(vouched.ip, safe=":.")
        fields = f"v1;id={vouched.edge_id};t={int(now_s)};ip={ip};sub={sub}".encode()
        return b"%b;sig=%b" % (fields, self._signature(method, target, fields))

    def read(self, value: bytes, method: bytes, target: bytes, now_s: float) -> ForwardedClient | None:
        """Whom an edge vouches for; None if this is not the word of one, or is old."""
        fields, mark, signature = value.rpartition(b";sig=")
        if not mark or len(value) > VALUE_BYTES_MAX:
            return None
        if not hmac.compare_digest(signature, self._signature(method, target, fields)):
            return None
        version, *pairs = fields.split(b";")
        found = [pair.partition(b"=") for pair in pairs]
        if version != b"v1" or tuple(name for name, _, _ in found) != _FIELDS:
            return None
        edge_id, at_s, ip, sub = (text.decode("latin-1") for _, _, text in found)
        if not at_s.isdigit() or abs(now_s - int(at_s)) > SIGNATURE_AGE_S_MAX:
            return None
        return ForwardedClient(edge_id, unquote(ip), unquote(sub))

    def _signature(self, method: bytes, target: bytes, fields: bytes) -> bytes:
        path, _, query = target.partition(b"?")
        message = b"\n".join((method, path, query, fields))
        return base64.urlsafe_b64encode(hmac.digest(self._key, message, hashlib.sha256)).rstrip(b"=")
