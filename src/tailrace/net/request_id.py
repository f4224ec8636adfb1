"""Ids of requests: taken from clients that send one, made where somebody may have to ask about an answer."""

from __future__ import annotations

import re
import secrets
from typing import Final

HEADER: Final = b"x-request-id"
ID_BYTES_MAX: Final = 128

_USABLE: Final = re.compile(rb"[\x21-\x7e]{1,%d}" % ID_BYTES_MAX)


def taken_id(value: bytes) -> bytes:
    """The client's own id, or a new one in place of what cannot be sent back as it is."""
    return value if _USABLE.fullmatch(value) else new_id()


def new_id() -> bytes:
    return secrets.token_hex(8).encode()
