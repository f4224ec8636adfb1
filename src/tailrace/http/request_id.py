"""Ids of requests: taken from clients that send one, made where somebody may have to ask about an answer."""

from __future__ import annotations

import re
import secrets
from typing import Final

REQUEST_ID_HEADER: Final = b"x-request-id"
REQUEST_ID_LINE_START: Final = b"X-Request-Id: "
REQUEST_ID_BYTES_MAX: Final = 128

_VALID_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,%d}" % REQUEST_ID_BYTES_MAX)


def request_id_from_client(value: bytes) -> bytes:
    """The client's own id, or a new one in place of what cannot be sent back as it is."""
    return value if _VALID_REQUEST_ID.fullmatch(value) else new_request_id()


def new_request_id() -> bytes:
    return secrets.token_hex(8).encode()


def strip_request_id(head: bytes) -> bytes:
    """The head lines of an answer that is passed on, without the id that somebody else gave the request."""
    begin = head.find(REQUEST_ID_LINE_START)
    return head if begin < 0 else head[:begin] + head[head.index(b"\r\n", begin) + 2 :]
