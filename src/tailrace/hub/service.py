"""The hub as a part of the server: set-up, reload, metrics, retention, stream access."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jwt

from tailrace.auth import Identity, TokenVerifier
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.hub import decide, session_lifecycle
from tailrace.hub.addresses import MAILBOX_PREFIX, TOPIC_PREFIX, parse_address
from tailrace.hub.errors import HubError
from tailrace.hub.policy import Policy, load_policy, principal_from_identity
from tailrace.hub.registry import REGISTRY_STREAM
from tailrace.hub.restore import restore_hub
from tailrace.hub.routes import HubRoutes
from tailrace.hub.runner import EffectRunner, LogStreams
from tailrace.hub.signatures import SECRET_BYTES, SignatureKey
from tailrace.hub.state import Hub, HubOptions
from tailrace.log.model import Lifetime
from tailrace.routing.context import Context
from tailrace.storage.retention_service import RetentionBound

if TYPE_CHECKING:
    from tailrace.storage.sealing import SealingService


class HubStreamAccess:
    """Read access to hub streams over HTTP, by the hub policy, which a reload replaces."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @classmethod
    def from_settings(cls, settings: Settings) -> HubStreamAccess:
        return cls(_load_policy(settings))

    def may_read(self, identity: Identity, name: str) -> bool:
        """Topics need the right to subscribe, the registry to discover, a mailbox the right to its address.

        A token without a valid address cannot connect to the hub, and so reads nothing here.
        """
        try:
            actor = principal_from_identity(identity, parse_address(f"@({identity.actor_id})"))
        except HubError:
            return False
        if name == REGISTRY_STREAM:
            return self.policy.may(actor, "discover")
        if name.startswith(TOPIC_PREFIX):
            return self.policy.may_topic(actor, "subscribe", name.removeprefix(TOPIC_PREFIX))
        if name.startswith(MAILBOX_PREFIX):
            return actor.has("mailbox") and self.policy.may_register(actor, name.removeprefix(MAILBOX_PREFIX))
        return False


def _load_policy(settings: Settings) -> Policy:
    return load_policy(settings.hub_policy, topics_open=settings.hub_topics_default == "allow")


logger = logging.getLogger("tailrace.hub")

SESSION_SECRET_BYTES: Final = 32  # of renewal and resume tokens


class HubService:
    """The hub of one server."""

    def __init__(
        self,
        context: Context,
        verifier: TokenVerifier | None,
        access: HubStreamAccess,
        sealing: SealingService,
    ) -> None:
        settings = context.settings
        self._context = context
        self._settings = settings
        self._keys = load_signature_keys(settings.hub_keys) if settings.hub_keys else {}
        self.streams = LogStreams(context.log)
        self._access = access
        self.hub = Hub(
            context.limits,
            self.streams,
            access.policy,
            self._options(settings, verifier),
            lambda: secrets.token_urlsafe(SESSION_SECRET_BYTES),
        )
        self.runner = EffectRunner(context, self.hub, self.streams, sealing.retention.look_again)
        self.routes = HubRoutes(self.runner, settings)
        self._connect(context.telemetry)
        sealing.retention.add_bounds(self._bounds)

    def _options(self, settings: Settings, verifier: TokenVerifier | None) -> HubOptions:
        return HubOptions(
            address=settings.hub_address,
            durable_topics=tuple(
                text.strip() for text in settings.hub_durable_topics.split(",") if text.strip()
            ),
            trace=settings.hub_trace,
            signatures_required=settings.hub_signatures == "required",
            mint=_token_minter(settings) if settings.hub_mint_tokens else None,
            verify=None if verifier is None else (lambda token: verifier.verify(b"Bearer " + token.encode())),
            keys_of=None if not settings.hub_keys else (lambda path: self._keys.get(path, [])),
            on_bug=_log_bug,
            on_broadcast=self._context.telemetry.hub_broadcast_seconds.observe,
        )

    def _bounds(self) -> list[RetentionBound]:
        """The bounds of the last sweep, once; the next sweep finds what is left."""
        bounds, self.hub.sweep.bounds = self.hub.sweep.bounds, {}
        found: list[RetentionBound] = []
        for name, bound in bounds.items():
            stream = self.streams.find(name)
            if stream is not None:
                lifetime = Lifetime(retention_s=-(-bound.age_ms // 1000), retention_bytes=bound.bytes_max)
                found.append(RetentionBound(stream.number, lifetime, bound.upto))
        return found

    async def start(self) -> None:
        await restore_hub(self.hub, self.streams, self._context.log, self.runner.now_ms())
        self.runner.start()

    def reload(self) -> None:
        """SIGHUP: reloads policy and keys, and disconnects sessions that the new policy denies."""
        settings = self._settings
        try:
            policy = _load_policy(settings)
            keys = load_signature_keys(settings.hub_keys) if settings.hub_keys else {}
        except TailraceError as error:
            logger.error(
                "hub policy reload failed, keeping the last loaded version",
                extra=log_fields(error=str(error)),
            )
            return
        self._keys = keys
        self.hub.policy = self._access.policy = policy
        self.hub.rates.policy = policy
        now_ms = self.runner.now_ms()
        session_lifecycle.disconnect_denied(self.hub, now_ms)
        self.runner.run(decide.collect_effects(self.hub, now_ms))

    def stop(self) -> None:
        self.runner.stop()

    def end_live(self) -> None:
        """Shutdown: disconnects all clients."""
        self.runner.shut_down()

    def _connect(self, telemetry: ServerMetrics) -> None:
        """Connects metrics to the counters they are read from."""
        hub = self.hub

        def counted(name: str) -> Callable[[], list[tuple[list[str], float]]]:
            return lambda: [
                ([*label.split("/")], count)
                for (known, label), count in list(hub.counts.items())
                if known == name
            ]

        telemetry.hub_messages.each = counted("messages")
        telemetry.hub_deliveries.each = counted("deliveries")
        telemetry.hub_errors.each = counted("errors")
        telemetry.hub_dead_letters.each = counted("dead_letters")
        telemetry.hub_duplicates.each = counted("duplicates")
        telemetry.hub_rate_limited.each = counted("rate_limited")
        telemetry.hub_ws_closes.each = counted("ws_closes")
        telemetry.hub_from_rewritten.read = lambda: hub.counts[("from_rewritten", "")]
        telemetry.hub_dropped.read = lambda: hub.flow_control.dropped
        telemetry.hub_pauses.read = lambda: hub.flow_control.pauses
        telemetry.hub_sessions.read = lambda: len(hub.sessions)
        telemetry.hub_detached_sessions.read = lambda: sum(one.detached for one in hub.sessions.values())
        telemetry.hub_actors.each = lambda: _count_actors(hub)
        telemetry.hub_registry_fill_ratio.read = lambda: len(hub.registry) / hub.limits.hub_registry_actors
        telemetry.hub_queue_messages.read = lambda: sum(one.outbox.messages for one in hub.sessions.values())
        telemetry.hub_queue_bytes.read = lambda: sum(one.outbox.bytes for one in hub.sessions.values())
        telemetry.hub_mailbox_lag.read = lambda: sum(
            hub.mailboxes.session_lag(one)[0] for one in hub.sessions.values()
        )
        telemetry.hub_asks_open.read = lambda: len(hub.pending)


def _count_actors(hub: Hub) -> list[tuple[list[str], float]]:
    durable = sum(found.options.durable for found in hub.registry.by_path.values())
    return [(["true"], durable), (["false"], len(hub.registry) - durable)]


def _log_bug(error: Exception) -> None:
    logger.error("hub message handler failed", exc_info=error)


def _token_minter(settings: Settings) -> Callable[[Identity, int], str]:
    """Makes tokens with the claims of the old one; needs the shared secret."""
    if not settings.auth_jwt_secret:
        raise TailraceError("invalid_request", "hub_mint_tokens needs auth_jwt_secret")

    def mint(identity: Identity, seconds: int) -> str:
        claims = json.loads(identity.claims)
        now_s = int(time.time())
        # The granted scopes, which may be fewer than the claimed ones.
        scope = " ".join(sorted(identity.scopes))
        claims |= {"iat": now_s, "exp": now_s + seconds, "jti": secrets.token_hex(8), "scope": scope}
        # Revoking the first token, or removing the key that issued it, revokes the minted ones too.
        claims["trOrigin"] = identity.origin_id or identity.token_id
        claims["trVouched"] = identity.credential
        return jwt.encode(claims, settings.auth_jwt_secret.encode(), algorithm="HS256")

    return mint


def load_signature_keys(path: str) -> dict[str, list[SignatureKey]]:
    """Signature secrets by identity: `{"@(a/b)": [{"id", "secret" (hex), "createdAt", "retiredAt"}]}`."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        found: dict[str, list[SignatureKey]] = {}
        for address, listed in given.items():
            found[address[2:-1]] = [
                SignatureKey(one["id"], bytes.fromhex(one["secret"]), one["createdAt"], one.get("retiredAt"))
                for one in listed
            ]
            if any(len(key.secret) != SECRET_BYTES for key in found[address[2:-1]]):
                raise ValueError(f"secret must have {SECRET_BYTES} bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TailraceError("invalid_request", f"hub keys {path}: {error}") from None
    return found
