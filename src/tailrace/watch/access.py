"""What the rules of a collection let somebody see and do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import orjson

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.watch.collection import Collection
from tailrace.watch.document import Document
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.predicate import Predicate, PredicatePart
from tailrace.watch.rules import NO_AUTH, AccessRule, RuleAuth

RULES_CACHED_MAX: Final = 1000


class AccessRules:
    """Rules by their text, compiled once."""

    def __init__(self) -> None:
        self._rules: OrderedDict[str, AccessRule] = OrderedDict()

    def rule(self, source: str, name: str) -> AccessRule:
        found = self._rules.get(source)
        if found is None:
            found = self._rules[source] = AccessRule(source, name)
            if len(self._rules) > RULES_CACHED_MAX:
                self._rules.popitem(last=False)
        return found

    def read_part(self, identity: Identity, collection: Collection | None) -> PredicatePart | None:
        """The read rule as one more condition on documents; None if there is no rule."""
        source = None if collection is None else collection.config.read_rule
        if source is None:
            return None
        return self.rule(source, "readRule").part_for(rule_auth(identity), "read")

    def read_digest(self, identity: Identity, collection: Collection | None) -> bytes:
        """Changes when what the identity may read could."""
        source = None if collection is None else collection.config.read_rule
        if collection is None or source is None:
            return b""
        version = collection.config.rule_version.to_bytes(8, "big")
        return version + self.rule(source, "readRule").meaning(rule_auth(identity))

    def read_meaning(self, identity: Identity, collection: Collection | None) -> bytes:
        """Changes when what the identity may read does; empty if there is no rule."""
        source = None if collection is None else collection.config.read_rule
        if source is None:
            return b""
        return self.rule(source, "readRule").meaning(rule_auth(identity))

    def readable(self, identity: Identity, collection: Collection, flat: Document) -> bool:
        part = self.read_part(identity, collection)
        if part is None:
            return True
        try:
            return Predicate([part]).matches(flat)
        except CostExceededError:
            return False

    def writing(
        self, identity: Identity
    ) -> Callable[[Collection, str, Document | None, Document | None], None]:
        """A check of each write: the rule has to hold on what there was and on what there will be."""

        def check(collection: Collection, method: str, old: Document | None, new: Document | None) -> None:
            source = collection.decided.write_rule  # which may not be durable yet, as this write is not
            if source is None:
                return
            rule, auth = self.rule(source, "writeRule"), rule_auth(identity)
            images = [image for image in (old, new) if image is not None]
            if not images or not all(rule.allows(auth, method, image) for image in images):
                raise TailraceError("forbidden", "the write rule of the collection says no")

        return check


def rule_auth(identity: Identity) -> RuleAuth:
    """`request.auth`; empty without authentication, so that a rule that reads it denies."""
    if identity.anonymous:
        return NO_AUTH
    claims: dict[str, Any] = orjson.loads(identity.claims)
    roles = claims.get("roles")
    username = claims.get("username", claims.get("preferred_username"))
    found: RuleAuth = {
        "userId": identity.sub,
        "claims": claims,
        "roles": roles if type(roles) is list else [],
    }
    if isinstance(username, str):
        found["username"] = username
    return found
