"""Query parameters of reads: parsing, live mode, start position, routing key, wait time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from tailrace.common import timestamps
from tailrace.common.errors import TailraceError
from tailrace.protocol import offsets
from tailrace.protocol.http_headers import WAIT_LIMIT_HEADER, expose_headers_line, header_line

QUERY_BYTES_CACHED = 512
SINGLE_VALUED_PARAMS = frozenset(
    {
        "offset",
        "live",
        "cursor",
        "key",
        "since",
        "filter",
        "format",
        "timeout",
        "timeout_ms",
        "limit",
        "after",
        "max_bytes",
        "max_entries",
    }
)
LIVE_MODES = {
    "long-poll": "long-poll",
    "true": "long-poll",
    "1": "long-poll",
    "sse": "sse",
    "ws": "ws",
    "ws-internal": "ws",
    "": "",
    "false": "",
    "0": "",
}


def parse_query(raw: bytes) -> dict[str, str]:
    """Query parameters; the result is shared and must not be changed. Unknown ones are included."""
    return parse_query_cached(raw) if len(raw) <= QUERY_BYTES_CACHED else _parse_params(raw)


def _parse_params(raw: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in raw.split(b"&"):
        if not item:
            continue
        name, _, value = item.partition(b"=")
        try:
            key = unquote_to_bytes(name.replace(b"+", b" ")).decode()
            text = unquote_to_bytes(value.replace(b"+", b" ")).decode()
        except UnicodeDecodeError:
            raise TailraceError("invalid_request", "the query string must be UTF-8") from None
        if key in found and key in SINGLE_VALUED_PARAMS:
            raise TailraceError(
                "invalid_offset" if key == "offset" else "invalid_request", f"{key} must be given only once"
            )
        found[key] = text
    return found


parse_query_cached = lru_cache(maxsize=4096)(_parse_params)


def live_mode(query: dict[str, str]) -> str:
    """`long-poll`, `sse`, `ws`, or empty for a read that does not wait."""
    mode = LIVE_MODES.get(query.get("live", ""))
    if mode is None:
        raise TailraceError("invalid_request", "live must be long-poll, sse or ws")
    return mode


class ReadStart(NamedTuple):
    """The start of a read as requested."""

    offset: str | None  # None if the request has none
    since: str | None  # used only without an offset
    header: bytes  # the Stream-Start line, if the request has more than an offset


def read_start(query: dict[str, str], mode: str, headers: Mapping[bytes, bytes]) -> ReadStart:
    """`Last-Event-ID` takes precedence on an event stream, then `offset`, then `since`.

    A browser's `EventSource` reconnects with its original URL, so the id of the last event that it received
    is newer than everything in the URL. An id that is not an offset is ignored, as the header is in all other
    modes; `Stream-Start` says what was used instead.
    """
    offset, since = query.get("offset"), query.get("since")
    last_event_id = headers.get(b"last-event-id") if mode == "sse" else None
    if last_event_id:
        try:
            resumed = offsets.encode_offset(*offsets.parse_offset(last_event_id.decode("latin-1")))
            return ReadStart(resumed, since, header_line("Stream-Start", "last-event-id"))
        except TailraceError:
            pass
    elif since is None:
        return ReadStart(offset, None, b"")
    return ReadStart(offset, since, header_line("Stream-Start", "since" if offset is None else "offset"))


def routing_key(query: dict[str, str], path_key: str | None) -> str:
    """The routing key of a read, empty for all entries. The path takes precedence."""
    if path_key is not None:
        return path_key
    key = query.get("key")
    if key == "":
        # No entry has an empty key; treating it as absent would return the entries of all keys.
        raise TailraceError("invalid_request", "key must not be empty")
    return key or ""


def wait_ms(query: dict[str, str], default_ms: int, max_ms: int) -> int:
    """How long a long-poll waits: `timeout_ms`, else `timeout`, within the limit."""
    requested_ms = _requested_wait_ms(query)
    return min(default_ms if requested_ms is None else requested_ms, max_ms)


def wait_limit_lines(query: dict[str, str], max_ms: int) -> bytes:
    """For the response to a long-poll without data: the limit, if the client requested a longer wait."""
    requested_ms = _requested_wait_ms(query)
    if requested_ms is None or requested_ms <= max_ms:
        return b""
    return header_line(WAIT_LIMIT_HEADER, str(max_ms)) + expose_headers_line((WAIT_LIMIT_HEADER,))


def _requested_wait_ms(query: dict[str, str]) -> int | None:
    if (exact := query.get("timeout_ms")) is not None:
        if not exact.isascii() or not exact.isdigit() or len(exact) > 12:
            raise TailraceError("invalid_timeout", "timeout_ms must be whole milliseconds")
        return int(exact)
    if (text := query.get("timeout")) is not None:
        return timestamps.parse_timeout_ms(text)
    return None
