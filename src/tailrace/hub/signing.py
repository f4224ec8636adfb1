"""Which messages have to be signed, and whether a signature is its sender's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tailrace.hub.errors import HubError
from tailrace.hub.fields import HubRequest
from tailrace.hub.session import Session
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
            raise HubError("invalid_signature", "this hub takes signed messages only")
        return
    if keys_of is None:
        if hub.dev:
            return  # nobody has a secret: there is nothing to hold it against
        raise HubError("invalid_signature", "this hub has no secret of yours")
    try:
        verify_signature(request.frame, signature, keys_of(path), now_ms)
    except HubError:
        hub.audit(session, "signature", request.id, "invalid", now_ms, path)
        raise
    request.verified = True
