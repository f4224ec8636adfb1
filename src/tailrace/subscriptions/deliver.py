"""One webhook call: a POST to an address that was checked, bounded in time and size, no redirects."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from typing import Final, NamedTuple

import httptools
import msgspec

from tailrace.subscriptions.ssrf import WebhookTarget

HEAD_BYTES_MAX: Final = 64 * 1024
READ_BYTES: Final = 16 * 1024


class WebhookResponse(NamedTuple):
    status: int
    body: bytes  # as much as was read
    complete: bool

    @property
    def accepted(self) -> bool:
        return 200 <= self.status < 300

    @property
    def done(self) -> bool:
        """Whether a worker says that it has dealt with the wake already."""
        if not (self.accepted and self.complete):
            return False
        try:
            return msgspec.json.decode(self.body, type=_ResponseBody).done is True
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


class _ResponseBody(msgspec.Struct):
    done: object = False


class DeliveryError(Exception):
    """No usable answer; the message says why, without secrets."""


async def post_webhook(
    target: WebhookTarget,
    addresses: Sequence[str],
    headers: Sequence[tuple[str, str]],
    body: bytes,
    *,
    answer_bytes_max: int,
    tls: ssl.SSLContext | None,
) -> WebhookResponse:
    """Sends the body and reads the answer. The caller sets the time limit by cancelling."""
    reader, writer = await _connect(target, addresses, tls)
    try:
        lines = [f"POST {target.path} HTTP/1.1", f"Host: {target.authority}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += ["User-Agent: tailrace", "Accept: application/json", "Connection: close"]
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        await writer.drain()
        return await _read(reader, answer_bytes_max)
    except (OSError, httptools.HttpParserError) as error:
        raise DeliveryError(str(error) or type(error).__name__) from None
    finally:
        writer.transport.abort()


async def _connect(
    target: WebhookTarget, addresses: Sequence[str], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The first checked address that answers. The name is used for the certificate, never looked up again."""
    assert (target.scheme == "https") == (tls is not None)
    trouble = "the host has no address"
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address, target.port, ssl=tls, server_hostname=target.host if tls is not None else None
            )
        except OSError as error:
            trouble = error.strerror or str(error)
    raise DeliveryError(f"cannot connect: {trouble}")


class _ResponseReader:
    """Collects one response; what httptools calls while it parses."""

    def __init__(self, parser_of: type[httptools.HttpResponseParser], body_bytes_max: int) -> None:
        self.parser = parser_of(self)
        self._body_bytes_max = body_bytes_max
        self.status = 0
        self.body = bytearray()
        self.head_complete = False
        self.complete = False
        self.full = False

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.head_complete = self.status >= 200

    def on_body(self, data: bytes) -> None:
        room = self._body_bytes_max - len(self.body)
        self.full = self.full or len(data) > room
        self.body += data[:room]

    def on_message_complete(self) -> None:
        # An interim answer (1xx) announces the real one.
        self.complete = self.head_complete


async def _read(reader: asyncio.StreamReader, body_bytes_max: int) -> WebhookResponse:
    answer = _ResponseReader(httptools.HttpResponseParser, body_bytes_max)
    head_bytes = 0
    while not (answer.complete or answer.full):
        data = await reader.read(READ_BYTES)
        if not data:
            if not answer.head_complete:
                raise DeliveryError("the connection was closed without an answer")
            break
        if not answer.head_complete:
            head_bytes += len(data)
            if head_bytes > HEAD_BYTES_MAX + READ_BYTES:
                raise DeliveryError("the answer's head is too long")
        # After a complete message the rest of the data is not ours.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            answer.parser.feed_data(data)
    return WebhookResponse(answer.status, bytes(answer.body), not answer.full)
