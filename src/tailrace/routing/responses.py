"""Answers: header lines that more than one route needs, and the one form of an error."""

from __future__ import annotations

from urllib.parse import urlencode

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.common.timestamps import format_rfc3339
from tailrace.http import cors
from tailrace.http.exchange import Exchange
from tailrace.http.request_log import failure_log
from tailrace.log.commit import refuse_after_commit
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
    """Where reading can begin, once that is no longer the start."""
    return header_line("Stream-Earliest-Offset", stream.offset(stream.earliest)) if stream.earliest else b""


def content_type_header(stream: Stream) -> bytes:
    return header_line("Content-Type", stream.content_type or DEFAULT_CONTENT_TYPE)


def lifetime_headers(stream: Stream) -> bytes:
    """How long the stream and its entries live, as far as that is set."""
    set_to = stream.lifetime
    lines = b""
    if set_to.ttl_s is not None:
        lines += header_line("Stream-TTL", str(set_to.ttl_s))
    deadline_ns = stream.deadline_ns()
    if deadline_ns is not None:
        lines += header_line("Stream-Expires-At", format_rfc3339(deadline_ns))
    if set_to.retention_s is not None:
        lines += header_line("Stream-Retention", str(set_to.retention_s))
    if set_to.retention_bytes is not None:
        lines += header_line("Stream-Retention-Bytes", str(set_to.retention_bytes))
    return lines


def method_not_allowed(allow: str) -> TailraceError:
    return TailraceError("method_not_allowed", f"this path takes {allow}", headers=(("Allow", allow),))


def render_error(exchange: Exchange | None, refusal: TailraceError) -> tuple[int, bytes, bytes]:
    """As `error`; the request can be asked about by its id, and is in the log if the fault is ours."""
    if exchange is not None:
        exchange.assign_request_id()
        if refusal.status >= 500:
            failure_log.log_failure(exchange, refusal)
    return error_response(refusal)


def respond_error(exchange: Exchange, refusal: TailraceError) -> None:
    """For those who answer later; whoever raises is answered in the same way by net."""
    if refusal.pending_commit is not None:
        hold, refusal.pending_commit = refusal.pending_commit, None
        hold(lambda failure: respond_error(exchange, failure or refusal))
        return
    exchange.respond(*exchange.connection.server.app.refuse(exchange, refusal))


def stream_deleted(stream: Stream) -> TailraceError:
    """The refusal for a stream that was deleted while a request was at work on it."""
    code = "stream_gone" if stream.gone and not stream.removed else "not_found"
    return refuse_after_commit(TailraceError(code, "the stream was deleted"), stream.batch)


def base_url(exchange: Exchange, settings: Settings) -> str:
    """What absolute URLs begin with: the configured base, else how the client reached us."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    scheme, host = load_trusted_proxies(settings.trusted_proxies).base_of(exchange)
    return f"{scheme}://{host}"


def page_limit(query: dict[str, str], limits: Limits) -> int:
    """How much of a listing is asked for."""
    text = query.get("limit")
    if text is None:
        return limits.list_page
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= limit <= limits.list_page_max:
        raise TailraceError("invalid_request", f"limit must be 1 to {limits.list_page_max}")
    return limit


def next_page_header(path: str, limit: int, after: str, **kept: str) -> bytes:
    """The header that says where a listing goes on."""
    following = {"limit": str(limit), "after": after, **kept}
    return header_line("Link", f'<{path}?{urlencode(following)}>; rel="next"')
