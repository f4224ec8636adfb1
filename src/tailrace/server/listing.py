"""GET /v1/streams."""

from __future__ import annotations

from urllib.parse import urlencode

import orjson

from tailrace.auth import Action, Identity, authorise, visible_prefixes
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.timestamps import format_rfc3339
from tailrace.http.exchange import Exchange
from tailrace.log.listing import list_streams
from tailrace.log.model import Stream
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE, header_line
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.server.documents import observability_pair, read_profile_kind


class ListingRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context

    def list(self, exchange: Exchange, identity: Identity) -> None:
        query = parse_query(exchange.query)
        action = listing_action(query)
        authorise(identity, action)
        system = action is Action.LIST_SYSTEM
        limit = page_limit(query, self._context.limits)
        after, prefix = query.get("after", ""), query.get("prefix", "")
        found: list[Stream] = []
        for visible in visible_prefixes(identity, prefix):
            # One more than asked for tells whether there is a next page.
            wanted = limit + 1 - len(found)
            found += list_streams(self._context.log, after, visible, wanted, system) if wanted else []
        more = len(found) > limit
        found = found[:limit]
        head = responses.JSON_TYPE + responses.NO_STORE
        if more:
            kept = {name: query[name] for name in ("prefix", "system") if name in query}
            head += next_page_header("/v1/streams", limit, found[-1].name, **kept)
        exchange.respond(200, head, orjson.dumps([describe_stream(stream) for stream in found]))


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


def listing_action(query: dict[str, str]) -> Action:
    """What is asked for: the streams of users, or those of the server too."""
    system = query.get("system", "").lower() in ("true", "1")
    return Action.LIST_SYSTEM if system else Action.LIST


def describe_stream(stream: Stream) -> dict[str, object]:
    deadline_ns = stream.deadline_ns()
    return {
        "name": stream.name,
        "content_type": stream.content_type or DEFAULT_CONTENT_TYPE,
        "profile": read_profile_kind(stream),
        **observability_pair(stream),
        "created_at": format_rfc3339(stream.created_ns),
        "expires_at": None if deadline_ns is None else format_rfc3339(deadline_ns),
        "ttl_seconds": stream.lifetime.ttl_s,
        "closed": stream.visible_closed,
        "epoch": stream.epoch,
        "next_offset": str(stream.visible),
        "sealed_through": str(stream.sealed - 1),
        "uploaded_through": str(stream.sealed - 1),
        "end_offset": stream.offset(stream.visible),
        "earliest_offset": stream.offset(stream.earliest),
        "total_size_bytes": str(stream.size_bytes),
    }
