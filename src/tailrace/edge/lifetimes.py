"""How long a stream and its entries live, as its owner says, by the edge's own monotonic clock."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from math import inf
from typing import NamedTuple

from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.edge.connection import UpstreamResponse

# Of a stream that ends sooner without reads nothing is kept: there would be no time to renew it.
WINDOW_S_MIN = 4
# `Date` has whole seconds: the owner's clock may be this much further.
DATE_S = 1.0


class StreamLifetime(NamedTuple):
    """What bounds a stream. Set when the stream is made, and never changed."""

    window_s: int | None = None  # of a TTL: it ends if nobody reads or writes for this long
    ends_at: float = inf  # loop time before which it cannot have come to its fixed end
    retained: bool = False  # its oldest entries are taken away, by age or by size


NO_EXPIRY = StreamLifetime()


def parse_lifetime(reply: UpstreamResponse, sent_at: float) -> StreamLifetime:
    """What the answer to a HEAD says; `sent_at` is the loop time at which it was asked for."""
    window, expires = reply.get(b"stream-ttl"), reply.get(b"stream-expires-at")
    retained = any(reply.get(name) for name in (b"stream-retention", b"stream-retention-bytes"))
    if window is not None:
        return StreamLifetime(window_s=reply.number(b"stream-ttl") or 0, retained=retained)
    if expires is not None:
        left_s = _remaining_s(expires.decode("latin-1"), reply.get(b"date") or b"")
        return StreamLifetime(ends_at=sent_at + left_s, retained=retained)
    return StreamLifetime(retained=True) if retained else NO_EXPIRY


def _remaining_s(expires: str, date: bytes) -> float:
    """The time to an instant of the owner's clock, rounded down; none if it cannot be told."""
    instant_ns = parse_rfc3339_ns(expires)
    try:
        owner_s = parsedate_to_datetime(date.decode("latin-1")).timestamp()
    except ValueError:
        return -inf
    return -inf if instant_ns is None else instant_ns / 1e9 - owner_s - DATE_S


def renewal_due_at(window_s: int, renewed_at: float, asked_at: float, now: float) -> float:
    """When the stream has to be renewed for a read that its owner did not see.

    At most once in a quarter of the window, and so early that there is time for two more attempts.
    """
    return max(now, renewed_at + window_s / 4, asked_at + window_s / 4)
