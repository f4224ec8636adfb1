"""Handlers of hub:register, hub:renew, hub:unregister, hub:discover and hub:list_actors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import format_rfc3339
from tailrace.hub import mailbox_commands
from tailrace.hub.addresses import AddressPattern, mailbox_stream, parse_address
from tailrace.hub.effects import Append, AppendOutcome, Read, ReadResult
from tailrace.hub.errors import HubError, field_error, to_hub_error
from tailrace.hub.registry import (
    REGISTRY_PRESSURE_RATIO,
    REGISTRY_STREAM,
    TTL_S_DEFAULT,
    TTL_S_MAX,
    TTL_S_MIN,
    DeliveryOptions,
    Registration,
    RegistrationRecord,
    RegistryQuery,
    from_record,
    to_record,
)
from tailrace.hub.requests import HubRequest, parse_time_ns
from tailrace.hub.sender_identity import rename_session
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub, HubStreams


CAPABILITIES_MAX: Final = 256
EXPIRED_PER_CALL_MAX: Final = 1000
REGISTRATION_REWRITE_MS: Final = 24 * 3600 * 1000


def encode_registry_event(found: Registration, operation: str, reason: str, now_ms: int) -> bytes:
    """One event of hub/registry."""
    headers = {
        "operation": operation,
        "timestamp": format_rfc3339(now_ms * 1_000_000),
        "reason": reason,
    }
    message: dict[str, Any] = {"type": "actor", "key": found.address}
    if operation != "delete":
        message["value"] = to_record(found)
    message["headers"] = headers
    return msgspec.json.encode(message)


def register(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    text = request.payload.text("actorAddress")
    if text is None:
        raise field_error("actorAddress", "actorAddress is missing")
    path = parse_address(text)
    capabilities = request.payload.texts("capabilities")
    if not capabilities or len(capabilities) > CAPABILITIES_MAX:
        raise field_error("capabilities", f"capabilities must be a list of 1 to {CAPABILITIES_MAX} strings")
    options = _read_delivery_options(session, request)
    if not hub.policy.may_register(session.principal, path):
        raise hub.denied(session, "register", "not your address", text, now_ms)
    _check_room(hub, session, path, now_ms)
    ttl_ms = _ttl_ms(request, TTL_S_DEFAULT * 1000)
    renews = request.truth("renewOnHeartbeat") is True
    old = hub.registry.find(path, now_ms)
    found = Registration(
        path,
        capabilities,
        request.payload.object("metadata") or {},
        ttl_ms,
        options,
        old.registered_ms if old is not None and old.session is session else now_ms,
        now_ms + ttl_ms,
        hub.registry.next_version(path),
        session.path,
        session,
        session.id,
        renews_on_heartbeat=renews,
        used_ms=now_ms,
        logged_ms=now_ms,
    )
    again = old is not None and old.session is session
    reason = "updated" if again else "registered" if old is None or old.session is None else "taken_over"
    session.registering += 1

    def then(settled: AppendOutcome, now_ms: int) -> None:
        session.registering -= 1
        hub.registry.version_settled(path, found.version)
        if settled.error is not None:
            hub.send_request_error(session, request, to_hub_error(settled.error), now_ms)
            return
        _apply_registration(hub, session, request, found, settled, now_ms)

    operation = "insert" if old is None else "update"
    hub.append(
        Append(
            REGISTRY_STREAM, encode_registry_event(found, operation, reason, now_ms), then, key=path.encode()
        )
    )


def _read_delivery_options(session: Session, request: HubRequest) -> DeliveryOptions:
    payload = request.payload
    commit = payload.text("commit") or "auto"
    if commit not in ("auto", "manual"):
        raise field_error("commit", "commit must be auto or manual")
    if commit == "manual" and "mailbox" not in session.features:
        raise field_error("commit", "commit manual needs the client capability mailbox")
    in_flight, timeout = payload.integer("maxInFlight"), payload.integer("ackTimeout")
    deliver = payload.integer("maxDeliver")
    return DeliveryOptions(
        payload.truth("durable") is True,
        commit,
        payload.truth("push") is not False,
        256 if in_flight is None else max(1, min(in_flight, 256)),
        30_000 if timeout is None else max(1, min(timeout, 3600)) * 1000,
        5 if deliver is None else max(1, min(deliver, 1000)),
    )


def _ttl_ms(request: HubRequest, default_ms: int) -> int:
    """In seconds, or in ms as older clients send it. A value outside the bounds is moved to the bound.

    A registration has to outlast a connection that is lost and resumed, so the lower bound is not shorter
    than the default time for that. The response has the granted time.
    """
    seconds, millis = request.payload.value("ttlSeconds"), request.payload.value("ttl")
    for name, found in (("ttlSeconds", seconds), ("ttl", millis)):
        if found is None:
            continue
        if not isinstance(found, int | float) or isinstance(found, bool) or not found > 0:
            raise field_error(name, f"{name} must be a number greater than 0")
    if isinstance(seconds, int | float):
        wanted = seconds * 1000
    elif isinstance(millis, int | float):
        wanted = millis
    else:
        return default_ms
    return int(max(TTL_S_MIN * 1000, min(wanted, TTL_S_MAX * 1000)))


def _check_room(hub: Hub, session: Session, path: str, now_ms: int) -> None:
    limits = hub.limits
    if path not in session.addresses and len(session.addresses) + session.registering >= (
        limits.hub_session_addresses
    ):
        details = {"retryAfter": 1000, "kind": "register", "reason": "addresses"}
        raise HubError("rate_limited", "too many addresses on this session", details)
    if len(hub.registry) >= limits.hub_registry_actors and path not in hub.registry.by_path:
        expire_registrations(hub, now_ms, EXPIRED_PER_CALL_MAX)
        if len(hub.registry) >= limits.hub_registry_actors:
            details = {"retryAfter": 60_000, "kind": "register", "reason": "registry_full"}
            raise HubError("rate_limited", "the registry is full", details)


def _apply_registration(
    hub: Hub, session: Session, request: HubRequest, found: Registration, settled: AppendOutcome, now_ms: int
) -> None:
    """The event is durable: the session owns the address."""
    path = found.path
    old = hub.registry.by_path.get(path)
    if not session.alive:
        if old is not None and old.session is None:
            hub.registry.remove(old)
        if found.options.durable:
            _leave(found)
            hub.registry.put(found)
            if not hub.registry.is_pending(path):
                body = encode_registry_event(found, "update", "left", now_ms)
                hub.append(Append(REGISTRY_STREAM, body, key=path.encode()))
        elif not hub.registry.is_pending(path):
            hub.registry.remember(path, found.version)
            hub.append(
                Append(
                    REGISTRY_STREAM, encode_registry_event(found, "delete", "left", now_ms), key=path.encode()
                )
            )
        return
    known = old is not None and old.session is session
    if old is not None and old.session is not None and old.session is not session:
        _handle_takeover(hub, old, old.session, now_ms)
    hub.registry.put(found)
    hub.registry.set_token(found, f"renewal-{hub.make_secret()}", now_ms)
    session.addresses[path] = found
    if hub.is_open:
        rename_session(hub, session, path)
    hub.audit(session, "register", found.address, "ok", now_ms)
    _send_registered(hub, session, request, found, now_ms)
    hub.presence.notify("updated" if known else "joined", found, settled.offset, now_ms)
    hub.mailboxes.attach(found, session, now_ms)


def _send_registered(
    hub: Hub, session: Session, request: HubRequest, found: Registration, now_ms: int
) -> None:
    shown = {
        "actorAddress": found.address,
        "expiresAt": found.expires_ms,
        "ttlSeconds": found.ttl_ms // 1000,
        "renewalToken": found.renewal,
        "version": found.version,
    }
    durable = found.options.durable
    payload = {**shown, "durable": durable, "mailbox": mailbox_stream(found.path) if durable else None}
    fill = len(hub.registry) / hub.limits.hub_registry_actors
    metadata: dict[str, Any] = dict(shown)
    if fill >= REGISTRY_PRESSURE_RATIO:
        metadata["registryPressure"] = round(fill, 3)
    hub.send_reply(session, request, "hub:registered", payload, now_ms, msgspec.json.encode(metadata))


def _handle_takeover(hub: Hub, old: Registration, loser: Session, now_ms: int) -> None:
    loser.addresses.pop(old.path, None)
    hub.mailboxes.leave(old.path, loser)
    hub.audit(loser, "take-over", old.address, "ok", now_ms)
    if loser.path == old.path:
        payload: dict[str, Any] = {
            "reason": "duplicate_connection",
            "message": "replaced by another connection",
        }
        hub.send_notice(loser, "hub:disconnect", payload, now_ms)
        hub.close(loser, 1000, "duplicate_connection")
        return
    payload = {"actorAddress": old.address, "unregisteredAt": now_ms, "reason": "taken_over"}
    hub.send_notice(loser, "hub:unregistered", payload, now_ms)


def renew(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    token = request.text("renewalToken")
    found = None if token is None else hub.registry.by_token(token, now_ms)
    if found is None or found.session is not session:
        if token is not None:
            hub.audit(session, "renew", "", "invalid_token", now_ms)
        raise HubError("invalid_token", "no registration of this session has this renewal token")
    found.ttl_ms = _ttl_ms(request, found.ttl_ms)
    extend_registration(hub, found, now_ms)
    if token == found.renewal:
        hub.registry.set_token(found, f"renewal-{hub.make_secret()}", now_ms)
    else:
        found.old_renewal_until_ms = 0  # the old token works once
    payload = {
        "actorAddress": found.address,
        "expiresAt": found.expires_ms,
        "ttlSeconds": found.ttl_ms // 1000,
        "renewalToken": found.renewal,
        "newToken": found.renewal,
        "newRenewalToken": found.renewal,
        "version": found.version,
    }
    metadata = msgspec.json.encode({"expiresAt": found.expires_ms, "renewalToken": found.renewal})
    hub.send_reply(session, request, "hub:renewed", payload, now_ms, metadata)


def extend_registration(hub: Hub, found: Registration, now_ms: int) -> None:
    """Renewals are not logged: after a restart every registration has a full TTL again.

    One per day is, so that active registrations stay within the retention of the log.
    """
    found.expires_ms = now_ms + found.ttl_ms
    found.used_ms = now_ms
    hub.registry.schedule_expiry(found)
    if now_ms - found.logged_ms >= REGISTRATION_REWRITE_MS and not hub.registry.is_pending(found.path):
        found.logged_ms = now_ms
        hub.append(
            Append(
                REGISTRY_STREAM,
                encode_registry_event(found, "update", "renewed", now_ms),
                key=found.path.encode(),
            )
        )


def unregister(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    text = request.payload.text("actorAddress")
    path = request.sender.path if text is None else parse_address(text)
    found = session.addresses.get(path)
    delete_mailbox = request.payload.truth("deleteMailbox") is True
    if found is None and session.principal.admin and not hub.is_open:
        found = hub.registry.find(path, now_ms)
        if found is not None:
            hub.audit(session, "admin", found.address, "unregister", now_ms)
    if found is None:
        if hub.policy.may_register(session.principal, path) and hub.registry.find(path, now_ms) is None:
            raise HubError("unknown_actor", "not registered", {"actorAddress": f"@({path})"})
        raise hub.denied(session, "unregister", "not your address", f"@({path})", now_ms)
    gone = found

    def then(settled: AppendOutcome, now_ms: int) -> None:
        if settled.error is not None:
            hub.send_request_error(session, request, to_hub_error(settled.error), now_ms)
            return
        _remove_registration(hub, gone)
        hub.presence.notify("left", gone, settled.offset, now_ms)
        if delete_mailbox:
            mailbox_commands.remove_mailbox(hub, path, respond, now_ms)
        else:
            respond(now_ms)

    def respond(now_ms: int) -> None:
        if request.is_ask:
            payload = {"actorAddress": gone.address, "unregisteredAt": now_ms, "reason": "requested"}
            hub.send_reply(session, request, "hub:unregistered", payload, now_ms)

    if hub.registry.is_pending(path):
        then(AppendOutcome(), now_ms)  # the event of the take-over replaces this one
        return
    hub.append(
        Append(
            REGISTRY_STREAM,
            encode_registry_event(gone, "delete", "unregistered", now_ms),
            then,
            key=path.encode(),
        )
    )


def _remove_registration(hub: Hub, found: Registration) -> None:
    hub.registry.remove(found)
    owner = found.session
    if owner is not None and owner.addresses.get(found.path) is found:
        del owner.addresses[found.path]
        hub.mailboxes.leave(found.path, owner)


def expire_registrations(hub: Hub, now_ms: int, limit: int) -> None:
    """Removes expired registrations, which are invisible already, and logs that."""
    for found in hub.registry.pop_expired(now_ms, limit):
        owner = found.session
        _remove_registration(hub, found)
        if owner is not None and owner.alive and "delivery-notices" in owner.features:
            payload = {"actorAddress": found.address, "unregisteredAt": now_ms, "reason": "expired"}
            hub.send_notice(owner, "hub:unregistered", payload, now_ms)
        if not hub.registry.is_pending(found.path):
            _append_removal(hub, found, "expired", "expired", now_ms)


def release_addresses(hub: Hub, session: Session, now_ms: int) -> None:
    """Ephemeral addresses end with their session; durable ones stay, offline."""
    for path, found in tuple(session.addresses.items()):
        if hub.registry.by_path.get(path) is not found:
            continue
        if found.options.durable:
            _leave(found)
            if not hub.registry.is_pending(path):
                body = encode_registry_event(found, "update", "left", now_ms)
                _append_and_notify(hub, "left", found, body)
        else:
            hub.registry.remove(found)
            if not hub.registry.is_pending(path):
                _append_removal(hub, found, "left", "left", now_ms)
    session.addresses.clear()


def _leave(found: Registration) -> None:
    """A durable address stays registered without its session."""
    found.session, found.session_id = None, ""


def _append_removal(hub: Hub, found: Registration, reason: str, event: str, now_ms: int) -> None:
    _append_and_notify(hub, event, found, encode_registry_event(found, "delete", reason, now_ms))


def _append_and_notify(hub: Hub, told: str, found: Registration, body: bytes) -> None:
    def then(settled: AppendOutcome, now_ms: int) -> None:
        if settled.error is None:
            hub.presence.notify(told, found, settled.offset, now_ms)

    hub.append(Append(REGISTRY_STREAM, body, then, key=found.path.encode()))


DISCOVERY_PAGE_MAX: Final = 100
REPLAY_ENTRIES: Final = 1000
AS_OF_FORMS: Final = "asOf must be Unix milliseconds, an RFC 3339 timestamp with a time zone, or an offset"
REPLAY_BYTES: Final = 1024 * 1024
FULL_REWRITE_NS: Final = 2 * 24 * 3600 * 10**9  # every active registration is logged again within this time


class RegistryEvent(msgspec.Struct):
    """One event of hub/registry."""

    key: str
    value: RegistrationRecord | None = None
    headers: dict[str, Any] = {}


_event_decoder: Final = msgspec.json.Decoder(RegistryEvent)


def parse_registry_event(body: bytes) -> tuple[str, Registration | None]:
    """The path of an event, and its registration, None if removed."""
    found = _event_decoder.decode(body)
    if found.value is None:
        return found.key[2:-1], None
    registration = from_record(found.value)
    if found.headers.get("reason") == "left":
        registration.session_id = ""  # older entries still have it
    return found.key[2:-1], registration


def _page_limit(request: HubRequest) -> int:
    limit = request.payload.integer("limit")
    return DISCOVERY_PAGE_MAX if limit is None else max(1, min(limit, DISCOVERY_PAGE_MAX))


def discover(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    payload = request.payload
    if not hub.policy.may(session.principal, "discover"):
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
        "actors": [one.to_view() for one in page],
        "count": len(page),
        "totalMatches": None if more or cursor else len(page),
        "hasMore": more,
        "cursor": page[-1].path if more else None,
        "asOf": offset,
    }
    hub.send_reply(session, request, "hub:discovered", body, now_ms)


def list_actors(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    if not hub.policy.may(session.principal, "discover"):
        raise hub.denied(session, "discover", "denied by policy", "", now_ms)
    expire_registrations(hub, now_ms, len(hub.registry))
    limit = _page_limit(request)
    skip = max(0, request.payload.integer("offset") or 0)
    cursor = request.payload.text("cursor") or ""
    matching = hub.registry.matching(RegistryQuery(), now_ms, cursor)
    found = list(islice(matching, skip, skip + limit + 1))
    more = len(found) > limit
    body = {
        "actors": [one.to_view() for one in found[:limit]],
        "total": len(hub.registry),
        "offset": skip,
        "limit": limit,
        "hasMore": more,
        "cursor": found[limit - 1].path if more else None,
    }
    hub.send_reply(session, request, "hub:actor_list", body, now_ms)


def _discover_as_of(
    hub: Hub,
    session: Session,
    request: HubRequest,
    query: RegistryQuery,
    cursor: str,
    as_of: object,
    now_ms: int,
) -> None:
    """Discovery in the past: replays the registry events up to that time or offset."""
    streams = hub.streams
    tail, earliest = streams.tail(REGISTRY_STREAM) or 0, streams.earliest(REGISTRY_STREAM)
    upto, upto_ns = _parse_as_of(streams, as_of, tail)
    state: dict[str, Registration] = {}
    times: list[int] = []  # of the earliest entry, and of the last replayed
    at_ms = now_ms if upto_ns is None else upto_ns // 1_000_000

    def done(last: int, now_ms: int) -> None:
        if earliest and (not times or times[-1] - times[0] < FULL_REWRITE_NS):
            # Registrations of that time may have been logged before the earliest entry.
            details = {"earliestOffset": streams.offset(REGISTRY_STREAM, earliest)}
            error = HubError("offset_gone", "the registry log does not go back that far", details)
            hub.send_request_error(session, request, error, now_ms)
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
            hub.send_request_error(session, request, to_hub_error(found.error), now_ms)
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


def _parse_as_of(streams: HubStreams, as_of: object, tail: int) -> tuple[int, int | None]:
    """The last entry to replay, or `tail` and the last time in ns."""
    if isinstance(as_of, int) and not isinstance(as_of, bool):
        return tail, as_of * 1_000_000 + 999_999
    if not isinstance(as_of, str):
        raise field_error("asOf", AS_OF_FORMS)
    if "T" in as_of and "-" in as_of:
        time_ns = parse_time_ns(as_of)
        if time_ns is None:
            raise field_error("asOf", AS_OF_FORMS)
        return tail, time_ns
    try:
        return streams.resolve(REGISTRY_STREAM, as_of), None
    except TailraceError as error:
        raise to_hub_error(error) from None


def _was_registered(found: Registration, at_ms: int) -> bool:
    """Renewals are not in the log: what was not removed by then was registered."""
    return found.registered_ms <= at_ms
