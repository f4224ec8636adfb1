"""Connect, authenticate, resume, heartbeat, token refresh, expiry and end of sessions; signatures."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tailrace.auth import ANONYMOUS, Identity
from tailrace.common.errors import TailraceError
from tailrace.hub import registration
from tailrace.hub.errors import NOT_APPLIED, HubError, field_error
from tailrace.hub.flow_control import in_token_grace
from tailrace.hub.policy import principal_from_identity, read_claims
from tailrace.hub.requests import HubRequest
from tailrace.hub.sender_identity import identity_path, stamp_sender
from tailrace.hub.session import (
    CONNECTED,
    CONNECTING,
    DISCONNECTED,
    DISCONNECTING,
    FEATURES,
    NO_CONNECTION,
    Session,
)
from tailrace.hub.signatures import verify_signature

if TYPE_CHECKING:
    from tailrace.hub.state import Hub


SIGNED_TYPES: Final = frozenset(
    (
        *("hub:connect", "hub:register", "hub:send", "hub:reply"),
        *("hub:broadcast", "hub:publish", "hub:mailbox_commit"),
    )
)


def check_signature(hub: Hub, session: Session, path: str, request: HubRequest, now_ms: int) -> None:
    signature = request.envelope.signature
    keys_of = hub.options.keys_of
    if signature is None:
        if hub.options.signatures_required and request.envelope.type in SIGNED_TYPES:
            raise HubError("invalid_signature", "the message must be signed")
        return
    if keys_of is None:
        if hub.is_open:
            return  # without keys there is nothing to verify
        raise HubError("invalid_signature", "the hub has no signature key of this identity")
    try:
        verify_signature(request.frame, signature, keys_of(path), now_ms)
    except HubError:
        hub.audit(session, "signature", request.id, "invalid", now_ms, path)
        raise
    request.verified = True


PROTOCOL_VERSION: Final = "0.1.0"
SUPPORTED_VERSIONS: Final = (PROTOCOL_VERSION,)
OFFERED_FEATURES: Final = (
    "typed-errors",
    "resume",
    "presence",
    "reply",
    "groups",
    "wildcards",
    "durable",
    "mailbox",
    "as-of",
)
TOKEN_GRACE_MS: Final = 60_000
CLOCK_LEEWAY_MS: Final = 30_000
REFRESH_INTERVAL_MS: Final = 60_000
NONCES_MAX: Final = 16
FEATURE_SETS_MAX: Final = 2 ** len(FEATURES)
CLIENT_CAPABILITIES_MAX: Final = 256
MINTED_TOKEN_S: Final = 3600
_SEMVER: Final = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:[-+].{0,64})?")


def connect(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    """The first message. After an error the socket is closed."""
    try:
        _check_version(request)
        identity = _authenticate(hub, session, request, now_ms)
        path = _identity_path(hub, session, request, identity)
        words = _client_capabilities(request)
        if len(words) > CLIENT_CAPABILITIES_MAX:
            raise field_error(
                "capabilities", f"capabilities must be a list of at most {CLIENT_CAPABILITIES_MAX} strings"
            )
        actor = principal_from_identity(identity, path)
        check_signature(hub, session, path, request, now_ms)
    except HubError as error:
        hub.audit(session, "refuse", error.code, error.message, now_ms)
        hub.send_request_error(session, request, error, now_ms)
        hub.close(session, 1008, error.code)
        return
    features = _shared_feature_set(frozenset(words) & FEATURES)
    resumed = _find_resumable(hub, request, path)
    if resumed is not None:
        _take_over_session(hub, session, resumed, now_ms)
        session.resume_buffer, resumed.resume_buffer = resumed.resume_buffer, session.resume_buffer
        session.detached_bytes = resumed.detached_bytes
    session.identity, session.principal = identity, actor
    session.features = features
    session.upgrade_token = None
    session.expires_ms = None if identity.expires_at is None else int(identity.expires_at * 1000)
    session.state = CONNECTED
    request.sender = stamp_sender(hub, session, None)
    _close_oldest_sessions(hub, session, now_ms)
    hub.sessions[session.id] = session
    hub.add_identity(session)
    if "resume" in features:
        session.resume_token = f"rsm-{hub.make_secret()}"
        hub.by_resume[session.resume_token] = session
    hub.audit(session, "connect", "", "resumed" if resumed is not None else "ok", now_ms)
    _send_connected(hub, session, request, resumed is not None, now_ms)
    if resumed is not None:
        hub.flow_control.release(session)
        hub.presence.session_resumed(session, now_ms)
        hub.mailboxes.on_resumed(session, now_ms)


def _client_capabilities(request: HubRequest) -> list[str]:
    words = request.metadata.texts("capabilities")
    if words is None:
        words = request.payload.texts("capabilities")
    return words or []


@lru_cache(FEATURE_SETS_MAX)
def _shared_feature_set(found: frozenset[str]) -> frozenset[str]:
    """One shared object for equal feature sets."""
    return found


def _check_version(request: HubRequest) -> None:
    metadata, payload = request.metadata, request.payload
    version = metadata.text("protocolVersion") or payload.text("protocolVersion") or payload.text("version")
    match = _SEMVER.fullmatch(version or "")
    if match is None or match[1] != PROTOCOL_VERSION.partition(".")[0]:
        details = {
            "clientVersion": version,
            "serverVersion": PROTOCOL_VERSION,
            "supportedVersions": list(SUPPORTED_VERSIONS),
        }
        raise HubError(
            "version_mismatch", f"protocolVersion must be compatible with {PROTOCOL_VERSION}", details
        )


def _authenticate(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> Identity:
    verify = hub.options.verify
    if verify is None:
        return ANONYMOUS
    payload = request.payload
    token = request.metadata.text("authToken") or payload.text("authToken") or payload.text("jwt")
    token = token or session.upgrade_token
    if not token:
        details = {"action": "connect", "reason": "no token"}
        raise HubError("unauthorized", "authToken is missing", details)
    return _verify_token(hub, token, "connect", now_ms)


def _verify_token(hub: Hub, token: str, action: str, now_ms: int) -> Identity:
    """The identity of a valid token within the maximum age."""
    verify = hub.options.verify
    assert verify is not None
    bare = token[7:] if token[:7].lower() == "bearer " else token
    try:
        identity = verify(bare.strip())
    except TailraceError as error:
        if error.code != "unauthorized":
            raise HubError("unavailable", error.message) from None
        details = {"action": action, "reason": error.message}
        raise HubError("unauthorized", error.message, details) from None
    issued_s, age_ms = read_claims(identity).iat, hub.limits.hub_token_age_ms
    if issued_s is not None and age_ms and now_ms - issued_s * 1000 > age_ms + CLOCK_LEEWAY_MS:
        reason = "the token was issued too long ago"
        raise HubError("unauthorized", reason, {"action": action, "reason": reason})
    return identity


def _identity_path(hub: Hub, session: Session, request: HubRequest, identity: Identity) -> str:
    verified = None if hub.is_open else identity
    try:
        return identity_path(verified, request.envelope.from_, f"anonymous/{session.id}")
    except HubError:
        details = {"action": "connect", "reason": "the token has no valid address"}
        raise HubError(
            "unauthorized", "actorId or sub of the token is not a valid address", details
        ) from None


def _find_resumable(hub: Hub, request: HubRequest, path: str) -> Session | None:
    """The session of a resume token, which is single use and bound to its identity."""
    token = request.metadata.text("resumeToken") or request.payload.text("resumeToken")
    found = None if token is None else hub.by_resume.get(token)
    if found is None or not found.alive:
        return None
    return found if found.path == path or hub.is_open else None


def _take_over_session(hub: Hub, session: Session, old: Session, now_ms: int) -> None:
    """Moves everything that the old connection owns to the new one."""
    if old.resume_token is not None:
        hub.by_resume.pop(old.resume_token, None)
    if not old.detached:
        # The client has noticed first that its old connection is dead.
        hub.close(old, 1000, "resumed")
        hub.flow_control.ended(old, now_ms)
    old.state = DISCONNECTED
    hub.sessions.pop(old.id, None)
    hub.remove_identity(old)
    session.id = old.id
    session.addresses, old.addresses = old.addresses, {}
    for found in session.addresses.values():
        found.session = session
    session.subscriptions, old.subscriptions = old.subscriptions, {}
    for subscription in session.subscriptions.values():
        subscription.session = session
    session.watches, old.watches = old.watches, None
    for watch in (session.watches or {}).values():
        watch.session = session
    session.queues, old.queues = old.queues, {}
    for path in session.queues:
        queue = hub.mailboxes.queues.get(path)
        if queue is not None:
            queue.session = session
    hub.pending.transfer(old, session)


def _close_oldest_sessions(hub: Hub, session: Session, now_ms: int) -> None:
    """Enforces the limit of sessions per identity. Without authentication the identity is the address: a
    reloaded page replaces its old connection."""
    held = hub.by_identity.get(session.path, {})
    living = [one for one in held if one.alive and one is not session]
    while len(living) >= hub.limits.hub_connections_per_identity:
        oldest = living.pop(0)
        send_disconnect(hub, oldest, "duplicate_connection", "replaced by another connection", now_ms)
        if oldest.detached:
            end_session(hub, oldest, now_ms)
        else:
            hub.close(oldest, 1000, "duplicate_connection")


def send_disconnect(hub: Hub, session: Session, reason: str, message: str, now_ms: int, **more: Any) -> None:
    payload = {"reason": reason, "message": message, **more}
    hub.send_notice(session, "hub:disconnect", payload, now_ms)


def _send_connected(hub: Hub, session: Session, request: HubRequest, resumed: bool, now_ms: int) -> None:
    limits = hub.limits
    payload = {
        "sessionId": session.id,
        "serverVersion": PROTOCOL_VERSION,
        "maxMessageSize": limits.hub_message_bytes,
        "heartbeatInterval": limits.hub_heartbeat_ms,
        "capabilities": {
            "maxActorsPerInstance": limits.hub_registry_actors,
            "supportsBackpressure": True,
            "supportedContentTypes": ["application/json"],
            "features": list(OFFERED_FEATURES),
        },
        "resumeToken": session.resume_token,
        "resumed": resumed,
    }
    metadata: dict[str, Any] = {
        "actorIdentity": f"@({session.path})",
        "sessionId": session.id,
        "tokenExpiresAt": session.expires_ms,
        "serverTime": now_ms,
    }
    hub.send_reply(session, request, "hub:connected", payload, now_ms, msgspec.json.encode(metadata))


def heartbeat(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    sent_ms = request.payload.integer("timestamp")
    for found in session.addresses.values():
        if found.renews_on_heartbeat and found.expires_ms > now_ms:
            registration.extend_registration(hub, found, now_ms)
    payload = {"timestamp": request.envelope.timestamp if sent_ms is None else sent_ms, "serverTime": now_ms}
    hub.send_reply(session, request, "hub:heartbeat_ack", payload, now_ms)


def disconnect(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    payload = {"acknowledged": True, "sessionId": session.id, "cleanedUp": True}
    hub.send_reply(session, request, "hub:disconnect", payload, now_ms)
    hub.close(session, 1000, "client_requested")


def refresh_token(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    """Accepts a newer token of the same identity, or issues one."""
    nonce = request.metadata.text("nonce") or request.payload.text("nonce")
    used = {known: at for known, at in (session.nonces or {}).items() if now_ms - at < REFRESH_INTERVAL_MS}
    if nonce is not None:
        if nonce in used or len(used) >= NONCES_MAX:
            raise HubError("replay_detected", "the nonce was used before")
        used[nonce] = now_ms
    session.nonces = used or None
    wait_ms = session.refreshed_ms + REFRESH_INTERVAL_MS - now_ms
    if session.refreshed_ms and wait_ms > 0:
        raise HubError(
            "rate_limited",
            "a token can be refreshed once per minute",
            {"retryAfter": wait_ms, "kind": "refresh"},
        )
    given = request.metadata.text("authToken") or request.payload.text("authToken")
    minted: str | None = None
    if hub.is_open:
        identity = session.identity
    elif given is not None:
        identity = _verify_refreshed_token(hub, given, now_ms)
    else:
        current = request.payload.text("token")
        if current is None:
            raise field_error("authToken", "authToken is missing")
        identity = _verify_refreshed_token(hub, current, now_ms)
        if hub.options.mint is None:
            raise HubError("invalid_token", "this hub does not issue tokens")
        if identity.actor_id == session.path:
            minted = hub.options.mint(identity, MINTED_TOKEN_S)
            identity = _verify_refreshed_token(hub, minted, now_ms)
    if not hub.is_open and identity.actor_id != session.path:
        hub.audit(session, "refresh", "", "other identity", now_ms)
        details = {"action": "refresh", "reason": "the token belongs to another identity"}
        raise HubError("unauthorized", "the token belongs to another identity", details)
    session.identity, session.principal = identity, principal_from_identity(identity, session.path)
    session.expires_ms = None if identity.expires_at is None else int(identity.expires_at * 1000)
    session.expiry_notified = False
    session.refreshed_ms = now_ms
    hub.audit(session, "refresh", "", "ok", now_ms)
    payload = {"tokenExpiresAt": session.expires_ms, "expiresAt": session.expires_ms, "token": minted}
    hub.send_reply(session, request, "hub:token_refreshed", payload, now_ms)
    hub.flow_control.release(session)
    hub.mailboxes.on_room(session, now_ms)


def _verify_refreshed_token(hub: Hub, token: str, now_ms: int) -> Identity:
    try:
        return _verify_token(hub, token, "refresh", now_ms)
    except HubError as error:
        if error.code != "unauthorized":
            raise
        raise HubError("invalid_token", error.message) from None


# -- the end ---------------------------------------------------------------------------------------------


def socket_closed(hub: Hub, session: Session, code: int, now_ms: int) -> None:
    """After an unclean close, a resumable session stays detached for the resume window."""
    hub.count("ws_closes", str(session.closed_with or code))
    resumable = "resume" in session.features and session.state == CONNECTED and not hub.draining
    if resumable and code not in (1000, 1001):
        session.detached_until_ms = now_ms + hub.limits.hub_resume_window_ms
        session.outbox.connection = NO_CONNECTION
        hub.flow_control.ended(session, now_ms)
        return
    end_session(hub, session, now_ms)


def end_session(hub: Hub, session: Session, now_ms: int) -> None:
    """Releases what the session owns, once. The cost does not depend on the size of the hub."""
    if session.state == DISCONNECTED:
        return
    session.state = DISCONNECTED
    hub.sessions.pop(session.id, None)
    if session.resume_token is not None:
        hub.by_resume.pop(session.resume_token, None)
    hub.remove_identity(session)
    hub.dead_letters.session_ended(session, now_ms)
    hub.flow_control.ended(session, now_ms)
    hub.pending.session_ended(session, now_ms)
    hub.topics.session_ended(session)
    hub.presence.session_ended(session)
    for path in tuple(session.queues):
        hub.mailboxes.leave(path, session)
    registration.release_addresses(hub, session, now_ms)
    session.held_frames = None


# -- time ------------------------------------------------------------------------------------------------


def tick_session(hub: Hub, session: Session, now_ms: int) -> None:
    """Once a second for every session."""
    if session.state == CONNECTING:
        if now_ms - session.opened_ms >= hub.limits.hub_connect_ms:
            # Not `unauthorized`, which is final for clients: a client on a busy machine may just be late.
            details = {"action": "connect", "reason": "not_connected", "outcome": NOT_APPLIED}
            hub.send_error(
                session, HubError("timeout", "no hub:connect before the deadline", details), now_ms
            )
            hub.close(session, 1008, "not_connected")
        return
    if session.state == DISCONNECTING:
        return
    if session.detached:
        if now_ms >= session.detached_until_ms:
            end_session(hub, session, now_ms)
        return
    session.minute.roll(session, now_ms)
    hub.flow_control.on_second(session, now_ms)
    if session.expires_ms is None:
        return
    remaining = session.expires_ms - now_ms
    if remaining <= TOKEN_GRACE_MS and not session.expiry_notified:
        session.expiry_notified = True
        if "token-refresh" in session.features:
            payload = {"tokenExpiresAt": session.expires_ms, "remaining": max(0, remaining)}
            hub.send_notice(session, "hub:token_expiring", payload, now_ms)
    if in_token_grace(session, now_ms) and -remaining >= TOKEN_GRACE_MS:
        disconnect_unauthorized(hub, session, "the token has expired", now_ms)


def disconnect_unauthorized(hub: Hub, session: Session, reason: str, now_ms: int) -> None:
    """Ends a session that has lost its rights."""
    hub.audit(session, "dismiss", "", reason, now_ms)
    send_disconnect(hub, session, "unauthorized", reason, now_ms)
    if session.detached:
        end_session(hub, session, now_ms)
    else:
        hub.close(session, 1008, reason)


def disconnect_denied(hub: Hub, now_ms: int) -> None:
    """Disconnects sessions that hold an address which the policy now denies."""
    for session in tuple(hub.sessions.values()):
        if not all(hub.policy.may_register(session.principal, path) for path in session.addresses):
            disconnect_unauthorized(hub, session, "the hub policy has changed", now_ms)


def disconnect_revoked(hub: Hub, is_valid: Callable[[Identity], bool], now_ms: int) -> int:
    """Ends sessions with revoked identities; they cannot be resumed."""
    lost = [one for one in hub.sessions.values() if not is_valid(one.identity)]
    for session in lost:
        disconnect_unauthorized(hub, session, "the token was revoked", now_ms)
    return len(lost)


def disconnect_all(hub: Hub, delays: dict[str, int], now_ms: int) -> None:
    """SIGTERM: notifies all clients when to reconnect; the delays spread them."""
    hub.draining = True
    for session in tuple(hub.sessions.values()):
        if session.detached:
            continue
        after = delays.get(session.id, 0)
        send_disconnect(hub, session, "server_shutdown", "restarting", now_ms, reconnectAfter=after)
        hub.close(session, 1001, "server_shutdown")
