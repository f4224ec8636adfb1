"""Who may read the hub's streams past the hub, by HTTP: whoever could have had it from the hub."""

from __future__ import annotations

from tailrace.auth import Identity
from tailrace.hub.addresses import MAILBOX_PREFIX, TOPIC_PREFIX, parse_address
from tailrace.hub.errors import HubError
from tailrace.hub.policy import Policy, principal_from_identity
from tailrace.hub.presence import REGISTRY_STREAM


class HubStreamAccess:
    """The rules in force. They are replaced as a whole when they are read again."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def may_read(self, identity: Identity, name: str) -> bool:
        """Topics need the right to subscribe, the registry to discover, a mailbox the right to its address.

        A token that names no address opens no session at the hub, and so reads nothing here.
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
