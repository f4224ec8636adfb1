"""Rules: worked in beforehand, they say what they say on their own."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.watch_language import NAMES, Maker
from tailrace.common.errors import TailraceError
from tailrace.watch.access_rules import NO_AUTH, AccessRule, RuleAuth
from tailrace.watch.cel import compile_cel
from tailrace.watch.predicate import Predicate, PredicatePart

PATHS = (
    "request.auth.userId",
    "request.auth.claims.org",
    "request.auth.claims['x-y']",
    "request.auth.claims.list",
    "request.auth.roles",
    "request.auth.claims.none",
    "request.method",
)


def rule_of(maker: Maker) -> str:
    """An expression about the document and about who asks."""
    pick = maker.random.choice
    parts = [
        f"doc.{pick(NAMES)} {pick(('==', '!=', '<', '>='))} {pick(PATHS)}",
        f"{pick(PATHS)} in doc.{pick(NAMES)}",
        f"doc.{pick(NAMES)} in {pick(PATHS)}",
        f"'editor' in {pick(PATHS)}",
        f"has({pick(('request.auth.claims.org', 'request.auth.none', 'request.auth.claims.org.deep'))})",
        f"{pick(PATHS)} == {maker.scalar()}",
        f"request.auth.claims.list.exists(x, x == doc.{pick(NAMES)})",
        f"({pick(PATHS)} == {maker.scalar()} ? doc.{pick(NAMES)} == 1 : has(doc.{pick(NAMES)}))",
        maker.truth(2),
    ]
    chosen = [pick(parts) for _ in range(maker.random.randrange(1, 4))]
    return f" {pick(('&&', '||'))} ".join(f"({part})" for part in chosen)


def auth_of(maker: Maker) -> RuleAuth:
    pick = maker.random.choice
    if maker.random.random() < 0.1:
        return NO_AUTH
    claims: dict[str, Any] = {"org": maker.value(1), "x-y": maker.value(1), "list": [maker.value(0), "a", 1]}
    if maker.random.random() < 0.3:
        del claims["org"]
    return {"userId": pick(("a", "b")), "claims": claims, "roles": pick((["editor"], [], ["a", "b"]))}


@given(st.integers(0, 2**32))
def test_w47_a_rule_worked_in_is_the_rule(seed: int) -> None:
    maker = Maker(seed)
    source, where = rule_of(maker), maker.truth(2)
    try:
        rule, query = AccessRule(source, "readRule"), PredicatePart(*compile_cel(where))
    except TailraceError:
        return  # it does not pass the checker
    alone = compile_cel(source, rule=True)[1]
    assert query.program is not None
    for _ in range(4):
        auth = auth_of(maker)
        request = {"auth": auth, "method": "read"}
        whole = Predicate([query, rule.predicate_part(auth, "read")])
        for _ in range(6):
            document = maker.document()
            allowed = alone.holds(doc=document, request=request)
            assert rule.allows(auth, "read", document) is allowed, (source, auth, document)
            expected = allowed and query.program.holds(doc=document)
            assert whole.matches(document) is expected, (source, where, auth, document)
            if expected and whole.branches:
                from tailrace.watch.predicate_index import PredicateIndex, ProbeResult

                index: PredicateIndex[Predicate] = PredicateIndex(1)
                found: ProbeResult[Predicate] = ProbeResult()
                index.add(whole)
                index.probe(document, found)
                assert found.sure | found.maybe == {whole}


@given(st.integers(0, 2**32))
def test_w28_a_renewed_token_means_the_same_and_another_claim_does_not(seed: int) -> None:
    maker = Maker(seed)
    rule = AccessRule("doc.org == request.auth.claims.org", "readRule")
    claims = {"org": maker.random.choice(("a", "b", 1, None)), "exp": 1}
    auth: RuleAuth = {"userId": "u", "claims": claims, "roles": []}
    renewed: RuleAuth = {**auth, "claims": {**claims, "exp": 2, "iat": 7}}
    other: RuleAuth = {**auth, "claims": {**claims, "org": "c"}}
    assert rule.fingerprint(auth) == rule.fingerprint(renewed)
    assert rule.fingerprint(auth) != rule.fingerprint(other)
