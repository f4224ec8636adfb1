"""Read and write rules of a collection, evaluated for an identity. No rule allows, an error denies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final, cast

import orjson

from tailrace.auth import Identity
from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.watch.cel import (
    REQUEST,
    Call,
    Const,
    Ident,
    ListLiteral,
    MapLiteral,
    Node,
    Quantified,
    Select,
    children,
    compile_cel,
)
from tailrace.watch.collection import Collection
from tailrace.watch.document import Document
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.predicate import Predicate, PredicatePart

RuleAuth = dict[str, Any]
NO_AUTH: Final[RuleAuth] = {}
# Claims that differ between tokens of the same identity.
_TOKEN_CLAIMS: Final = frozenset({"exp", "iat", "nbf", "jti"})


class AccessRule:
    """One compiled rule; `auth` is the identity it is evaluated for."""

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self._node, self._program = compile_cel(source, rule=True, name=name)

    def predicate_part(self, auth: RuleAuth, method: str) -> PredicatePart:
        """The rule as a predicate on documents, with the parts about the identity evaluated."""
        request = {"auth": auth, "method": method}
        return PredicatePart(_fold_request(self._node, request), self._program, {"request": request})

    def allows(self, auth: RuleAuth, method: str, flat: Document) -> bool:
        try:
            return Predicate([self.predicate_part(auth, method)]).matches(flat)
        except CostExceededError:
            return False

    def fingerprint(self, auth: RuleAuth) -> bytes:
        """A hash of the rule for a reader; a renewed token with equal claims has the same."""
        claims = cast("dict[str, Any]", auth.get("claims", {}))
        left_out = {name for name in _TOKEN_CLAIMS if name not in self.source}
        seen = {**auth, "claims": {name: claims[name] for name in claims.keys() - left_out}}
        part = self.predicate_part(seen, "read")
        # Parts that could not be evaluated may depend on any claim.
        rest = seen if _mentions(part.node, REQUEST) else {}
        raw = orjson.dumps(rest, option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(Predicate([part]).hash + raw).digest()[:16]


def _mentions(node: Node, name: str) -> bool:
    if isinstance(node, Ident):
        return node.name == name
    return any(_mentions(child, name) for child in children(node))


def _fold_request(node: Node, request: dict[str, Any]) -> Node:
    """The tree with every path into the request replaced by its value, if it has one."""
    found = _lookup(node, request)
    if found is not None:
        return found
    if isinstance(node, Select):
        return Select(_fold_request(node.operand, request), node.field, node.test)
    if isinstance(node, Call):
        return Call(node.function, tuple(_fold_request(argument, request) for argument in node.args))
    if isinstance(node, ListLiteral):
        return ListLiteral(tuple(_fold_request(item, request) for item in node.items))
    if isinstance(node, MapLiteral):
        return MapLiteral(
            tuple((_fold_request(key, request), _fold_request(value, request)) for key, value in node.entries)
        )
    if isinstance(node, Quantified):
        return Quantified(
            node.quantifier,
            node.variable,
            _fold_request(node.range, request),
            _fold_request(node.condition, request),
        )
    return node


def _lookup(node: Node, request: dict[str, Any]) -> Const | None:
    if isinstance(node, Ident):
        return Const(request) if node.name == REQUEST else None
    if isinstance(node, Select):
        operand, key = _lookup(node.operand, request), node.field
        test = node.test
    elif isinstance(node, Call) and node.function == "_[_]" and isinstance(node.args[1], Const):
        operand, key = _lookup(node.args[0], request), node.args[1].value
        test = False
    else:
        return None
    held: object = None if operand is None else operand.value
    if not isinstance(held, dict):
        return None
    known = cast("dict[str, Any]", held)
    if test:
        return Const(key in known)
    return Const(known[key]) if key in known else None


RULES_CACHED_MAX: Final = 1000


class AccessRules:
    """Compiled rules by source text."""

    def __init__(self) -> None:
        self._rules: LruCache[str, AccessRule] = LruCache(entries_max=RULES_CACHED_MAX)

    def rule(self, source: str, name: str) -> AccessRule:
        found = self._rules.get(source)
        if found is None:
            found = AccessRule(source, name)
            self._rules.put(source, found)
        return found

    def read_predicate_part(self, identity: Identity, collection: Collection | None) -> PredicatePart | None:
        """The read rule as a predicate part; None if there is no rule."""
        source = None if collection is None else collection.config.read_rule
        if source is None:
            return None
        return self.rule(source, "readRule").predicate_part(rule_auth(identity), "read")

    def read_digest(self, identity: Identity, collection: Collection | None) -> bytes:
        """Changes whenever what the identity may read could change."""
        source = None if collection is None else collection.config.read_rule
        if collection is None or source is None:
            return b""
        version = collection.config.rule_version.to_bytes(8, "big")
        return version + self.rule(source, "readRule").fingerprint(rule_auth(identity))

    def read_fingerprint(self, identity: Identity, collection: Collection | None) -> bytes:
        """Changes only when what the identity may read changes; empty without a rule."""
        source = None if collection is None else collection.config.read_rule
        if source is None:
            return b""
        return self.rule(source, "readRule").fingerprint(rule_auth(identity))

    def readable(self, identity: Identity, collection: Collection, flat: Document) -> bool:
        part = self.read_predicate_part(identity, collection)
        if part is None:
            return True
        try:
            return Predicate([part]).matches(flat)
        except CostExceededError:
            return False

    def write_check(
        self, identity: Identity
    ) -> Callable[[Collection, str, Document | None, Document | None], None]:
        """A check for writes: the rule must hold for the document before and after."""

        def check(collection: Collection, method: str, old: Document | None, new: Document | None) -> None:
            source = collection.effective_config.write_rule  # possibly not durable yet, like this write
            if source is None:
                return
            rule, auth = self.rule(source, "writeRule"), rule_auth(identity)
            images = [image for image in (old, new) if image is not None]
            if not images or not all(rule.allows(auth, method, image) for image in images):
                raise TailraceError("forbidden", "the write rule of the collection denies this write")

        return check


def rule_auth(identity: Identity) -> RuleAuth:
    """`request.auth`; empty without authentication, so rules that read it deny."""
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
