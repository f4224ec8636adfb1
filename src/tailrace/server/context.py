"""Where a span belongs: the `traceparent` header of W3C Trace Context, read and written."""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple

# Later versions may add fields at the end; what is known of them is read all the same.
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """A span as others see it."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True

    def child(self) -> TraceContext:
        """A new span in the same trace."""
        return TraceContext(self.trace_id, secrets.token_bytes(8), self.sampled)

    def header(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.sampled):02x}"


def new_trace() -> TraceContext:
    return TraceContext(secrets.token_bytes(16), secrets.token_bytes(8))


def parse_traceparent(value: bytes) -> TraceContext | None:
    """The caller's span; None if the header is not one, which counts as if it were not there."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = bytes.fromhex(match[2].decode()), bytes.fromhex(match[3].decode())
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))
