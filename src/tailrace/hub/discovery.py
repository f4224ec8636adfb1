"""`hub:discover` and `hub:list_actors`: who is registered, now or at an earlier moment."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.hub import registering
from tailrace.hub.addresses import AddressPattern
from tailrace.hub.effects import Read, ReadResult
from tailrace.hub.errors import HubError, field_error, to_hub_error
from tailrace.hub.fields import HubRequest
from tailrace.hub.presence import REGISTRY_STREAM
from tailrace.hub.registry import Registration, RegistrationRecord, RegistryQuery, from_record
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

DISCOVERY_PAGE_MAX: Final = 100
REPLAY_ENTRIES: Final = 1000
REPLAY_BYTES: Final = 1024 * 1024
FULL_REWRITE_NS: Final = 2 * 24 * 3600 * 10**9  # within two days everything that holds is written down again


class RegistryEvent(msgspec.Struct):
    """A message of the registry's log."""

    key: str
    value: RegistrationRecord | None = None
    headers: dict[str, Any] = {}


_event_decoder: Final = msgspec.json.Decoder(RegistryEvent)


def parse_registry_event(body: bytes) -> tuple[str, Registration | None]:
    """The path it is about, and what is registered there from then on."""
    found = _event_decoder.decode(body)
    return found.key[2:-1], None if found.value is None else from_record(found.value)


def _page_limit(request: HubRequest) -> int:
    asked = request.payload.integer("limit")
    return DISCOVERY_PAGE_MAX if asked is None else max(1, min(asked, DISCOVERY_PAGE_MAX))


def discover(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    payload = request.payload
    if not hub.policy.may(session.actor, "discover"):
        raise hub.denied(session, "discover", "denied by policy", "", now_ms)
    pattern = AddressPattern(payload.text("pattern") or "*")
    wanted = list(payload.texts("capabilities") or ())
    if (one := payload.text("capability")) is not None:
        wanted.append(one)
    query = RegistryQuery(pattern, pattern.prefix, tuple(wanted), payload.object("metadata") or {})
    cursor = payload.text("cursor") or ""
    as_of = payload.value("asOf")
    if as_of is not None:
        _discover_as_of(hub, session, request, query, cursor, as_of, now_ms)
        return
    offset = hub.streams.offset(REGISTRY_STREAM, hub.streams.tail(REGISTRY_STREAM) or 0)
    found = hub.registry.matching(query, now_ms, cursor)
    _send_discovered(hub, session, request, found, cursor, offset, now_ms)


def _send_discovered(
    hub: Hub,
    session: Session,
    request: HubRequest,
    matching: Iterable[Registration],
    cursor: str,
    offset: str,
    now_ms: int,
) -> None:
    limit = _page_limit(request)
    found = list(islice(matching, limit + 1))
    more = len(found) > limit
    page = found[:limit]
    body = {
        "actors": [one.shown() for one in page],
        "count": len(page),
        "totalMatches": None if more or cursor else len(page),
        "hasMore": more,
        "cursor": page[-1].path if more else None,
        "asOf": offset,
    }
    hub.reply(session, request, "hub:discovered", body, now_ms)


def list_actors(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    if not hub.policy.may(session.actor, "discover"):
        raise hub.denied(session, "discover", "denied by policy", "", now_ms)
    registering.expire_registrations(hub, now_ms, len(hub.registry))
    limit = _page_limit(request)
    skip = max(0, request.payload.integer("offset") or 0)
    cursor = request.payload.text("cursor") or ""
    matching = hub.registry.matching(RegistryQuery(), now_ms, cursor)
    found = list(islice(matching, skip, skip + limit + 1))
    more = len(found) > limit
    body = {
        "actors": [one.shown() for one in found[:limit]],
        "total": len(hub.registry),
        "offset": skip,
        "limit": limit,
        "hasMore": more,
        "cursor": found[limit - 1].path if more else None,
    }
    hub.reply(session, request, "hub:actor_list", body, now_ms)


def _discover_as_of(
    hub: Hub,
    session: Session,
    request: HubRequest,
    query: RegistryQuery,
    cursor: str,
    as_of: object,
    now_ms: int,
) -> None:
    """The registry as it was: its log is read again up to that moment."""
    streams = hub.streams
    tail, earliest = streams.tail(REGISTRY_STREAM) or 0, streams.earliest(REGISTRY_STREAM)
    upto_ns: int | None = None
    upto = tail
    if isinstance(as_of, int) and not isinstance(as_of, bool):
        upto_ns = as_of * 1_000_000 + 999_999
    elif isinstance(as_of, str) and "T" in as_of and "-" in as_of:
        try:
            upto_ns = int(datetime.fromisoformat(as_of).timestamp() * 1e9)
        except ValueError:
            raise field_error("asOf", "asOf is ms, a time of RFC 3339, or an offset") from None
    elif isinstance(as_of, str):
        try:
            upto = streams.resolve(REGISTRY_STREAM, as_of)
        except TailraceError as error:
            raise to_hub_error(error) from None
    else:
        raise field_error("asOf", "asOf is ms, a time of RFC 3339, or an offset")
    state: dict[str, Registration] = {}
    times: list[int] = []  # of the first entry that is left, and of the last that counts
    at_ms = now_ms if upto_ns is None else upto_ns // 1_000_000

    def done(last: int, now_ms: int) -> None:
        if earliest and (not times or times[-1] - times[0] < FULL_REWRITE_NS):
            # What held then may be written down before what is left.
            details = {"earliestOffset": streams.offset(REGISTRY_STREAM, earliest)}
            error = HubError("offset_gone", "the registry's log does not go back that far", details)
            hub.refuse_request(session, request, error, now_ms)
            return
        found = (
            state[path]
            for path in sorted(state)
            if path > cursor
            and query.matches(state[path])
            and (upto_ns is None or _was_registered(state[path], at_ms))
        )
        _send_discovered(hub, session, request, found, cursor, streams.offset(REGISTRY_STREAM, last), now_ms)

    def then(found: ReadResult, now_ms: int) -> None:
        if found.error is not None:
            hub.refuse_request(session, request, to_hub_error(found.error), now_ms)
            return
        last = found.next_entry
        for number, time_ns, body in found.entries:
            if number > upto or (upto_ns is not None and time_ns > upto_ns):
                done(number - 1, now_ms)
                return
            times[1:] = [time_ns]
            path, registration = parse_registry_event(body)
            if registration is None:
                state.pop(path, None)
            else:
                state[path] = registration
        if last >= upto or not found.entries:
            done(last, now_ms)
            return
        hub.effects.append(Read(REGISTRY_STREAM, last, REPLAY_ENTRIES, REPLAY_BYTES, then))

    if not tail:
        done(0, now_ms)
        return
    hub.effects.append(Read(REGISTRY_STREAM, earliest, REPLAY_ENTRIES, REPLAY_BYTES, then))


def _was_registered(found: Registration, at_ms: int) -> bool:
    """Renewals are not in the log: whoever was not removed by then was there."""
    return found.registered_ms <= at_ms
