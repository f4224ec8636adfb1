"""Subscriptions that were written down decide as before; masked ones do on masked documents."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tailrace.spark.live_queries.capture_job import Masker
from tailrace.spark.live_queries.subscription_matcher import (
    CompiledSubscriptions,
    MatcherMismatchError,
    SubscriptionSet,
    decode_subscription_set,
)
from tailrace.spark.live_queries.subscription_sets import fold_summaries
from tailrace.watch.access_rules import AccessRule
from tailrace.watch.document import RAW_NULL, ChangeEntry, ChangeImages, TransactionRef
from tailrace.watch.external_matching import (
    SubscriptionSummary,
    build_predicate,
    encode_predicate_part,
    interest_from_summary,
)
from tailrace.watch.predicate import PredicatePart, canonical_predicate
from tailrace.watch.query import read_query

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "a", "n": 7, "name": "x", "tags": ["red"], "email": "ada@example.com", "org": {"id": 1}},
    {"id": "b", "n": 7.0, "name": "abcdef", "tags": [], "email": None, "org": {"id": 2.0}},
    {"id": "c", "n": 9007199254740993, "flag": True, "tags": {"red": 1}, "org": "none"},
    {"id": "d", "name": "é😀\\'", "flag": False, "list": [{"k": 1}, {"k": 2}]},
    {"id": "e"},
]
QUERIES: list[dict[str, Any]] = [
    {},
    {"filters": [{"field": "n", "op": "==", "value": 7}]},
    {"filters": [{"field": "n", "op": ">", "value": 6.5}, {"field": "name", "op": "!=", "value": "x"}]},
    {"filters": [{"field": "name", "op": "in", "value": ["x", "é😀\\'"]}]},
    {"filters": [{"field": "tags", "op": "contains", "value": "red"}]},
    {"filters": [{"fieldPath": ["org", "id"], "op": "==", "value": 2}]},
    {"documents": ["a", "e"]},
    {"where": "has(doc.flag) && !doc.flag || doc.n == 7u"},
    {"where": "doc.list.exists(x, x.k > 1) ? doc.id == 'd' : false"},
    {"where": "string(doc.n) == '7'"},
    {"where": "{'a': doc.id}['a'] in ['a', 'c']"},
    {"where": 'doc.n > -1e308 && doc["name"].size() > 0'},
]


def summary_of(query: dict[str, Any], rule: PredicatePart | None = None) -> SubscriptionSummary:
    asked = read_query({"collection": "c", **query}, live=True)
    whole = build_predicate(asked.parts, rule, asked.documents)
    return SubscriptionSummary(
        database="d",
        collection="c",
        predicate=canonical_predicate(asked.parts if rule is None else [*asked.parts, rule], asked.documents),
        predicateHash=whole.hash.hex(),
        parts=[encode_predicate_part(part) for part in asked.parts],
        ruleInputs=None if rule is None else encode_predicate_part(rule),
        documents=None if asked.documents is None else sorted(asked.documents),
        priority="normal",
        position=[0],
        expires=0,
    )


def again(summary: SubscriptionSummary) -> SubscriptionSummary:
    """By way of the bytes."""
    return decode_subscription_set(SubscriptionSet({"k": summary}).encode()).subs["k"]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_what_was_written_down_decides_the_same(query: dict[str, Any]) -> None:
    asked = read_query({"collection": "c", **query}, live=True)
    original = build_predicate(asked.parts, None, asked.documents)
    read = interest_from_summary(again(summary_of(query))).predicate
    assert read.hash == original.hash
    assert [read.matches(one) for one in DOCUMENTS] == [original.matches(one) for one in DOCUMENTS]


def test_a_rule_is_written_down_as_what_it_comes_to() -> None:
    auth = {"userId": "u", "roles": ["r"], "claims": {"org": 1, "ssn": "never-read"}}
    rule = AccessRule("doc.org.id == request.auth.claims.org", "readRule").predicate_part(auth, "read")
    summary = again(summary_of({"filters": [{"field": "n", "op": "==", "value": 7}]}, rule))
    assert b"never-read" not in msgspec.json.encode(summary)
    interest = interest_from_summary(summary)
    assert [interest.predicate.matches(one) for one in DOCUMENTS] == [True, False, False, False, False]
    assert interest.rule is not None
    assert [interest.rule.matches(one) for one in DOCUMENTS[:2]] == [True, False]


def test_another_matcher_is_noticed() -> None:
    wrong = msgspec.structs.replace(summary_of({}), predicateHash="00")
    with pytest.raises(MatcherMismatchError):
        CompiledSubscriptions(SubscriptionSet({"k": wrong}))
    assert CompiledSubscriptions(SubscriptionSet({"k": wrong}), strict=False).matchers


def test_summaries_are_folded() -> None:
    value = msgspec.to_builtins(summary_of({}))

    def message(operation: str, key: str) -> bytes:
        body = {"type": "sub", "key": key, "headers": {"operation": operation}}
        return json.dumps(body if operation == "delete" else {**body, "value": value}).encode()

    reset = b'{"headers":{"control":"reset"}}'
    beat = b'{"type":"gateway","key":"g","value":{"expires":1},"headers":{"operation":"update"}}'
    found = fold_summaries(
        [message("insert", "old"), reset, message("insert", "a"), message("insert", "b"), beat]
    )
    assert found.keys() == {"a", "b"}
    assert fold_summaries(
        [message("insert", "a"), message("delete", "a"), message("insert", "b")]
    ).keys() == {"b"}


# -- masking -----------------------------------------------------------------------------------------------


def masker(*fields: str) -> Masker:
    return Masker(fields, b"k" * 32)


@pytest.mark.parametrize(
    "query",
    [
        {"filters": [{"field": "email", "op": "==", "value": "ada@example.com"}]},
        {"filters": [{"field": "email", "op": "in", "value": ["ada@example.com", "x"]}]},
        {"filters": [{"field": "n", "op": "==", "value": 7}]},
        {"filters": [{"field": "tags", "op": "contains", "value": "red"}]},
        {"where": "doc.email in ['ada@example.com'] && has(doc.name)"},
        {"where": "!(doc.email == 'ada@example.com') || doc.n == 7"},
        {"where": "doc.org.id == 1"},
        {"documents": ["a", "b"]},
    ],
    ids=str,
)
def test_masked_queries_find_the_same_masked_documents(query: dict[str, Any]) -> None:
    mask = masker("email", "n", "tags", "org.id", "id")
    summary = summary_of(query)
    masked = mask.summary(summary)
    assert masked is not None
    for secret in (b"ada@example.com", b'"a"', b"red", b"7"):
        text = msgspec.json.encode([masked.parts, masked.predicate, masked.documents])
        assert secret not in text or secret == b"7", text
    plain, hidden = interest_from_summary(summary).predicate, interest_from_summary(masked).predicate
    for one in DOCUMENTS:
        assert hidden.matches(mask.document(one, set())) == plain.matches(one), one


@pytest.mark.parametrize(
    "where",
    [
        "doc.email.startsWith('ada')",
        "doc.n > 3",
        "doc.org == {'id': 1}",
        "doc.tags.exists(t, t == 'red')",
        "size(doc.email) > 3",
        "doc.email + 'x' == 'y'",
        "string(doc.n) == '7'",
    ],
)
def test_what_cannot_be_masked_is_left_out(where: str) -> None:
    assert masker("email", "n", "tags", "org.id").summary(summary_of({"where": where})) is None


def test_a_masked_change_repeats_nothing() -> None:
    after = {
        "email": "ada@example.com",
        "note": "write to ada@example.com",
        "deep": [{"card": {"number": 4111, "kind": "v"}}],
        "n": 1,
    }
    entry = ChangeEntry(
        database="d",
        collection="c",
        documentKey="doc-1",
        op="insert",
        before=RAW_NULL,
        after=msgspec.Raw(json.dumps(after).encode()),
        images=ChangeImages("none", "full"),
        version=1,
        createdAt=1,
        prev=None,
        txn=TransactionRef("t", 0),
        commitTime="2026-01-01T00:00:00Z",
        writeId="for ada@example.com",
        writeDigest="0123456789abcdef",
    )
    raw = msgspec.json.encode(masker("email", "deep.card.number").change(entry))
    assert b"ada@" not in raw
    assert b"4111" not in raw
    assert b"0123456789abcdef" not in raw, "a guess at the content could be checked by its digest"
    assert b'"kind":"v"' in raw
    assert json.loads(raw)["after"]["n"] == 1
