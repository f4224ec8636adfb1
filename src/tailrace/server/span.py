"""A span: something that took a while, as it is exported."""

from __future__ import annotations

from typing import Final

import msgspec

from tailrace.server.context import TraceContext

# Kinds, by the numbers of the protocol.
INTERNAL: Final = 1
SERVER: Final = 2
CLIENT: Final = 3

TEXT_MAX: Final = 256  # characters of a name or an attribute
TRACESTATE_MAX: Final = 512

AttributeValue = str | int


class Span(msgspec.Struct, eq=False):
    """One that has ended, or will be ended by whoever began it."""

    name: str
    context: TraceContext
    begun_ns: int
    parent_id: bytes = b""
    kind: int = INTERNAL
    ended_ns: int = 0
    failed: bool = False
    tracestate: str = ""
    attributes: dict[str, AttributeValue] = {}
