"""The header in which an edge names the client of a forwarded request.

`v1;id=<edge>;t=<seconds>;ip=<client>;sub=<identity>;sig=<HMAC-SHA256, base64url>`, signed with a shared key
over the request and the fields before the signature. It grants nothing: the server uses it for rate limits
and logs.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

EDGE_HEADER: Final = b"tailrace-edge"
# Allowed clock difference between an edge and its server, and lifetime of a header.
SIGNATURE_AGE_S_MAX: Final = 60
SUB_CHARS_MAX: Final = 128
VALUE_BYTES_MAX: Final = 1024
_FIELDS: Final = (b"id", b"t", b"ip", b"sub")


class ForwardedClient(NamedTuple):
    """A client as seen by an edge."""

    edge_id: str
    ip: str
    sub: str  # empty if anonymous, or if the edge could not verify its token


class EdgeSignature:
    """Signs and verifies the header."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def sign(self, method: bytes, target: bytes, client: ForwardedClient, now_s: float) -> bytes:
        """The header value for one request; `target` is its path and query."""
        sub = quote(client.sub[:SUB_CHARS_MAX], safe="")
        ip = quote(client.ip, safe=":.")
        fields = f"v1;id={client.edge_id};t={int(now_s)};ip={ip};sub={sub}".encode()
        return b"%b;sig=%b" % (fields, self._signature(method, target, fields))

    def verify(self, value: bytes, method: bytes, target: bytes, now_s: float) -> ForwardedClient | None:
        """The client that an edge has signed; None if the signature is invalid or too old."""
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
