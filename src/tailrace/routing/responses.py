"""Responses: header lines that several routes use, and error responses."""

from __future__ import annotations

from urllib.parse import urlencode

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.common.timestamps import format_rfc3339
from tailrace.http import cors
from tailrace.http.exchange import Exchange
from tailrace.http.request_log import failure_log
from tailrace.log.group_commit import refuse_after_commit
from tailrace.log.model import Stream
from tailrace.protocol import http_headers
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE, header_line
from tailrace.routing.client_address import load_trusted_proxies

NO_STORE = http_headers.NO_STORE
CLOSED = b"Stream-Closed: true\r\n"
UP_TO_DATE = b"Stream-Up-To-Date: true\r\n"
JSON_TYPE = http_headers.JSON_TYPE

error_response = http_headers.error_response
add_phase = cors.add_timing_phase


def next_offset_header(offset: str) -> bytes:
    return f"Stream-Next-Offset: {offset}\r\n".encode("ascii")


def end_offset_header(offset: str) -> bytes:
    return f"Stream-End-Offset: {offset}\r\n".encode("ascii")


def earliest_offset_header(stream: Stream) -> bytes:
    """The earliest readable offset, if entries at the start were removed."""
    return header_line("Stream-Earliest-Offset", stream.offset(stream.earliest)) if stream.earliest else b""


def content_type_header(stream: Stream) -> bytes:
    return header_line("Content-Type", stream.content_type or DEFAULT_CONTENT_TYPE)


def lifetime_headers(stream: Stream) -> bytes:
    """TTL, expiry and retention headers, as far as they are set."""
    lifetime = stream.lifetime
    lines = b""
    if lifetime.ttl_s is not None:
        lines += header_line("Stream-TTL", str(lifetime.ttl_s))
    deadline_ns = stream.deadline_ns()
    if deadline_ns is not None:
        lines += header_line("Stream-Expires-At", format_rfc3339(deadline_ns))
    if lifetime.retention_s is not None:
        lines += header_line("Stream-Retention", str(lifetime.retention_s))
    if lifetime.retention_bytes is not None:
        lines += header_line("Stream-Retention-Bytes", str(lifetime.retention_bytes))
    return lines


def method_not_allowed(allow: str) -> TailraceError:
    return TailraceError("method_not_allowed", f"method must be {allow}", headers=(("Allow", allow),))


def render_error(exchange: Exchange | None, refusal: TailraceError) -> tuple[int, bytes, bytes]:
    """`error_response` with a request id; server errors are logged."""
    if exchange is not None:
        exchange.assign_request_id()
        if refusal.status >= 500:
            failure_log.log_failure(exchange, refusal)
    return error_response(refusal)


def respond_error(exchange: Exchange, refusal: TailraceError) -> None:
    """Send an error response, for handlers that respond later; the transport handles raised errors."""
    if refusal.pending_commit is not None:
        on_commit, refusal.pending_commit = refusal.pending_commit, None
        on_commit(lambda failure: respond_error(exchange, failure or refusal))
        return
    exchange.respond(*exchange.connection.server.app.refuse(exchange, refusal))


def stream_deleted(stream: Stream) -> TailraceError:
    """The error for a stream that was deleted while a request was being processed."""
    code = "stream_gone" if stream.gone and not stream.removed else "not_found"
    return refuse_after_commit(TailraceError(code, "the stream was deleted"), stream.batch)


def base_url(exchange: Exchange, settings: Settings) -> str:
    """The base of absolute URLs: the configured one, else the one the client used."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    scheme, host = load_trusted_proxies(settings.trusted_proxies).base_of(exchange)
    return f"{scheme}://{host}"


def page_limit(query: dict[str, str], limits: Limits) -> int:
    """The requested size of a page of a listing."""
    text = query.get("limit")
    if text is None:
        return limits.list_page
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= limit <= limits.list_page_max:
        raise TailraceError("invalid_request", f"limit must be 1 to {limits.list_page_max}")
    return limit


def next_page_header(path: str, limit: int, after: str, **params: str) -> bytes:
    """The Link header of the next page of a listing."""
    following = {"limit": str(limit), "after": after, **params}
    return header_line("Link", f'<{path}?{urlencode(following)}>; rel="next"')
