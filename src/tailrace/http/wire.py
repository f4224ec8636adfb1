"""Response bytes that are made once: status lines, lengths, chunk framing."""

from __future__ import annotations

from email.utils import formatdate
from http import HTTPStatus

# Bodies up to this size are joined with their head into one buffer; larger ones are handed to the transport
# beside it, because copying them would cost more than a second element in the vector.
JOIN_BYTES_MAX = 16 * 1024

STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in HTTPStatus
}

# The end of a head whose body has this many bytes; small bodies are by far the most common.
LENGTH_ENDS: tuple[bytes, ...] = tuple(b"Content-Length: %d\r\n\r\n" % size for size in range(2048))
LENGTH_ENDS_COUNT = len(LENGTH_ENDS)

CRLF = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CONNECTION_CLOSE = b"Connection: close\r\n"
CONNECTION_KEEP_ALIVE = b"Connection: keep-alive\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"

# Answers with these codes never have a body, nor a length.
BODILESS_STATUSES = frozenset((204, 304))


def length_end(size: int) -> bytes:
    """`Content-Length` and the empty line that ends the head."""
    return LENGTH_ENDS[size] if size < LENGTH_ENDS_COUNT else b"Content-Length: %d\r\n\r\n" % size


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def date_line(unix_s: float) -> bytes:
    return b"Date: %b\r\n" % formatdate(unix_s, usegmt=True).encode("ascii")


def chunk(payload: bytes) -> bytes:
    """One chunk of a streamed answer, to be framed once and written to many connections.

    An empty payload gives no bytes at all: an empty chunk would end the answer.
    """
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""


def unchunk(framed: bytes) -> bytes:
    """The payload of bytes made by `chunk`, for HTTP/1.0 clients, which know no chunks."""
    payloads: list[bytes] = []
    position = 0
    while position < len(framed):
        line_end = framed.index(CRLF, position)
        start = line_end + 2
        size = int(framed[position:line_end], 16)
        payloads.append(framed[start : start + size])
        position = start + size + 2
    return b"".join(payloads)
