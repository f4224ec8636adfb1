"""A refusal as HTTP: the only place where an error becomes a status, header lines and a body."""

from __future__ import annotations

from tailrace.common.errors import TailraceError
from tailrace.protocol.headers import header_line

NO_STORE = b"Cache-Control: no-store\r\n"
JSON_TYPE = b"Content-Type: application/json; charset=utf-8\r\n"


def error_response(refusal: TailraceError) -> tuple[int, bytes, bytes]:
    """Status, header lines and body.

    The way it came is of no use any more, and holds the request with its body: some refusals are in frames of
    that way themselves, others are raised again and again.
    """
    refusal.__traceback__ = refusal.__context__ = None
    head = JSON_TYPE + NO_STORE
    if refusal.retry_after_s is not None:
        head += header_line("Retry-After", str(refusal.retry_after_s))
    for name, value in refusal.headers:
        head += header_line(name, "".join(char if char.isprintable() else "?" for char in value))
    return refusal.status, head, refusal.body()
