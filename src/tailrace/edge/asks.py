"""What a request asks for, as far as the edge has to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urlencode

from tailrace.protocol import offsets, stream_names
from tailrace.protocol.query_params import live_mode, parse_query, read_start, routing_key

STREAM_PREFIX = b"/v1/stream/"
CONTROL_PREFIX = b"/v1/stream/__ds"


class RequestTarget(NamedTuple):
    """What a path names. Only ordinary streams are cached and shared; all else is forwarded as it is."""

    kind: str  # stream, reserved, resource, server or other
    name: str = ""
    key: str | None = None  # of `/pk/{key}`


def parse_target(path: bytes, name_bytes_max: int) -> RequestTarget:
    if not path.startswith(STREAM_PREFIX):
        return RequestTarget("server" if path.startswith(b"/v1/server") else "other")
    raw = path[len(STREAM_PREFIX) :]
    if path.startswith(CONTROL_PREFIX) and path[len(CONTROL_PREFIX) :][:1] in (b"", b"/"):
        return RequestTarget("other", "__ds")
    stream, slash, raw_key = raw.rpartition(b"/pk/")
    key: str | None = None
    if slash and b"/" not in raw_key:
        raw, key = stream, stream_names.decode_name(raw_key)
        if not key:
            return RequestTarget("other")
    name = stream_names.decode_name(raw)
    if name is None or not stream_names.is_valid_name(name, name_bytes_max):
        return RequestTarget("other")
    if name.startswith(("__", "hub/")) or name == "hub":
        return RequestTarget("reserved", name, key)
    if key is None and stream_names.is_sub_resource_name(name):
        return RequestTarget("resource", owning_stream(name))
    return RequestTarget("stream", name, key)


def owning_stream(path: str) -> str:
    """The stream that a sub-resource belongs to."""
    segments = path.split("/")
    for index in range(1, len(segments)):
        if (
            segments[index] in stream_names.RESERVED_LAST_SEGMENTS
            or segments[index] in stream_names.RESERVED_INNER_SEGMENTS
        ):
            return "/".join(segments[:index])
    return path


class SharedRead(NamedTuple):
    """A read that the edge may answer itself. Parameters that do not change its bytes are left out."""

    name: str
    offset: str  # 26 digits, -1 or now
    fmt: str
    key: str
    filter_text: str
    mode: str
    raw_live: str
    cursor: str | None
    query: dict[str, str]
    start_line: bytes = b""  # the header that tells which of several given starts was used

    @property
    def parameters(self) -> dict[str, str]:
        """What is asked of the upstream, in one order and one spelling."""
        return _parameters(self.offset, self.fmt, self.key, self.filter_text)

    @classmethod
    def plain(cls, name: str, offset: str, fmt: str, key: str) -> SharedRead:
        """The read of what follows an offset."""
        return cls(name, offset, fmt, key, "", "", "", None, {})


def parse_read(target: RequestTarget, raw_query: bytes, headers: Mapping[bytes, bytes]) -> SharedRead | None:
    """A GET on a stream as a read that can be shared; None if it has to be forwarded.

    Raises for what every server refuses: repeated parameters, malformed offsets.
    """
    query = parse_query(raw_query)
    mode = live_mode(query)
    start = read_start(query, mode, headers)
    given = start.offset
    if given is not None and given not in ("-1", "now"):
        given = offsets.encode_offset(*offsets.parse_offset(given))
    fmt = query.get("format", "")
    filter_text = query.get("filter")
    if fmt not in ("", "json", "raw") or (given is None and (mode or "since" in query)):
        return None
    if (filter_text is not None and mode) or (given == "now" and not mode):
        return None
    key = routing_key(query, target.key)
    return SharedRead(
        target.name,
        given or "-1",
        fmt,
        key,
        filter_text or "",
        mode,
        query.get("live", ""),
        query.get("cursor"),
        query,
        start.header,
    )


def _parameters(offset: str, fmt: str, key: str, filter_text: str) -> dict[str, str]:
    found = {"filter": filter_text, "format": fmt, "key": key, "offset": offset}
    return {name: value for name, value in found.items() if value}


def build_stream_target(name: str, parameters: dict[str, str]) -> bytes:
    """Path and query of a stream, as the edge asks for it."""
    query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
    return f"/v1/stream/{quote(name, safe='/')}{query}".encode()
