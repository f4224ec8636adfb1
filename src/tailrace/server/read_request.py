"""A read as it was asked for."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.auth import ANONYMOUS, Identity
from tailrace.log.model import Stream


class ReadRequest(NamedTuple):
    """Parameters checked and positions resolved."""

    stream: Stream
    start: int
    at_now: bool
    mode: str
    shared: bool  # a long-poll that shared caches may collapse
    fmt: str
    fmt_given: bool
    key: str
    wait_ms: int
    cursor: str | None
    filter_text: str = ""
    scanned_bytes: int = 0  # that a filter has cost so far
    bytes_max: int = 0  # of a page of rows, as it was asked for
    entries_max: int = 0
    start_line: bytes = b""  # the header that tells which of several given starts was used
    identity: Identity = ANONYMOUS  # of a long-poll, which may lose its right while it waits
