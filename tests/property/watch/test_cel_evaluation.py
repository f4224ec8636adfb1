"""The language: closures, index and library say the same about every document."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.watch_changes import change_of
from support.watch_language import NAMES, TEXTS, Maker, quoted
from tailrace.common.errors import TailraceError
from tailrace.watch.access_rules import AccessRule
from tailrace.watch.cel import cel_environments, compile_cel
from tailrace.watch.document import Change
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.evaluator import EvaluationError, compile_value
from tailrace.watch.interval_index import IntervalIndex
from tailrace.watch.matcher import BATCH_MIN, Interest, Matcher, MatchResult
from tailrace.watch.predicate import EITHER, Predicate, PredicatePart
from tailrace.watch.predicate_index import PredicateIndex, ProbeResult
from tailrace.watch.query import read_query

OPERATORS = ("==", "!=", "<", "<=", ">", ">=")


def compared(seeds: range, documents: int) -> int:
    """Decides generated pairs both ways; gives how many there were."""
    pairs = 0
    for seed in seeds:
        maker = Maker(seed)
        source = maker.truth()
        try:
            node, program = compile_cel(source)
        except TailraceError:
            continue  # it does not pass the checker
        predicate, evaluate = Predicate([PredicatePart(node, program)]), compile_value(node)
        for _ in range(documents):
            document = maker.document()
            kind, expected = program.value(doc=document)
            try:
                found = evaluate(document, None)
            except EvaluationError:
                found = None
            wanted = expected if kind == "BOOL" else None
            assert (found if type(found) is bool else None) is wanted, (seed, source, document)
            assert predicate.matches(document) is (wanted is True), (seed, source, document)
            pairs += 1
    return pairs


def test_w14_closures_equal_the_library() -> None:
    assert compared(range(1, 1100), 6) > 4000


@pytest.mark.nightly
def test_w14_closures_equal_the_library_on_many() -> None:
    assert compared(range(10_000, 40_000), 4) > 60_000


@pytest.mark.parametrize(
    "source",
    [
        "int(doc.a) == 1",
        "double(doc.n) > 1.5",
        "string(doc.n) == '10'",
        "uint(doc.a) == 1u",
        "doc.a == 1u",
        "doc.n + 1u > 2u",
        "type(doc.a) == int",
        "timestamp(doc.text) > timestamp('2020-01-01T00:00:00Z')",
        "duration('1s') < duration('2s') && doc.flag",
        "{'a': 1}.a == doc.a",
        "doc.list.exists(x, x == 1u)",
        "{1: 'a', 1: doc.text}.size() == 1",
        "{doc.a: 1, doc.b: 2}.size() == 2",
    ],
)
def test_what_is_not_lowered_is_left_to_the_library(source: str) -> None:
    node, program = compile_cel(source)
    predicate = Predicate([PredicatePart(node, program)])
    maker = Maker(7)
    for _ in range(100):
        document = maker.document()
        assert predicate.matches(document) is program.holds(doc=document)


@given(st.integers(0, 2**32))
def test_w17_filters_are_the_expressions_they_stand_for(seed: int) -> None:
    maker = Maker(seed)
    pick = maker.random.choice
    wanted: Any = maker.value(0)
    while isinstance(wanted, list | dict):
        wanted = maker.value(0)
    name, op = pick((*NAMES, "x-y", "quote'd", "😀")), pick((*OPERATORS, "in", "contains"))
    literal = "null" if wanted is None else quoted(wanted) if isinstance(wanted, str) else repr(wanted)
    literal = literal.lower() if isinstance(wanted, bool) else literal
    field = f"doc[{quoted(name)}]"
    sources = {"in": f"{field} in [{literal}]", "contains": f"{literal} in {field}"}
    program = compile_cel(sources.get(op, f"{field} {op} {literal}"))[1]
    filters = [{"fieldPath": [name], "op": op, "value": [wanted] if op == "in" else wanted}]
    predicate = Predicate(read_query({"collection": "c", "filters": filters}, live=True).parts)
    for _ in range(20):
        document = maker.document()
        assert predicate.matches(document) is program.holds(doc=document), (filters, document)


def test_w16_hostile_names_and_values_stay_what_they_are() -> None:
    for text in (*TEXTS, "' || true || '", '" || true', "\\", "`", "\n", "doc.a"):
        filters = [{"fieldPath": [text or "x"], "op": "==", "value": text}]
        predicate = Predicate(read_query({"collection": "c", "filters": filters}, live=True).parts)
        assert predicate.matches({text or "x": text})
        assert not predicate.matches({text or "x": f"{text}."})
        assert not predicate.matches({})
        if text:
            where = read_query(
                {"collection": "c", "where": f"doc[{quoted(text)}] == {quoted(text)}"}, live=True
            )
            assert Predicate(where.parts).hash == predicate.hash


@given(st.binary(max_size=200))
def test_w16_any_text_is_a_predicate_or_is_refused(raw: bytes) -> None:
    code = None
    try:
        compile_cel(raw.decode("latin-1"))
    except TailraceError as refusal:
        code = refusal.code
    assert code in (None, "invalid_query", "query_too_complex")


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({}, "invalid_query"),
        ({"collection": "a/b"}, "invalid_path"),
        ({"collection": "a", "more": 1}, "invalid_query"),
        ({"collection": "a", "limit": 3}, "unsupported_query"),
        ({"collection": "a", "where": "x" * 4097}, "query_too_complex"),
        ({"collection": "a", "where": "doc.a == '" + "x" * 1025 + "'"}, "query_too_complex"),
        ({"collection": "a", "where": "doc.a == 1 && " * 300 + "true"}, "query_too_complex"),
        ({"collection": "a", "where": "doc.a.matches('x')"}, "invalid_query"),
        ({"collection": "a", "where": "doc.a.map(x, x) == []"}, "invalid_query"),
        ({"collection": "a", "where": "doc.xs.exists(doc, doc == 1)"}, "invalid_query"),
        ({"collection": "a", "where": "request.auth.userId == 'x'"}, "invalid_query"),
        ({"collection": "a", "where": "now() == 1"}, "invalid_query"),
        ({"collection": "a", "where": "b'x' == b'x'"}, "invalid_query"),
        ({"collection": "a", "filters": [{"field": "a", "op": "~", "value": 1}]}, "invalid_query"),
        ({"collection": "a", "filters": [{"field": "a", "op": "==", "value": {}}]}, "invalid_query"),
        ({"collection": "a", "filters": [{"field": "a..b", "op": "==", "value": 1}]}, "invalid_query"),
        ({"collection": "a", "filters": [{"field": "a", "op": "==", "value": 1}] * 33}, "query_too_complex"),
        ({"collection": "a", "documents": ["x"] * 101}, "query_too_complex"),
    ],
)
def test_w48_queries_over_a_limit_are_refused(query: dict[str, Any], code: str) -> None:
    with pytest.raises(TailraceError) as refused:
        read_query(query, live=True)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "query",
    [
        {"where": "doc.a == '" + "x" * 1024 + "'"},
        {"where": "true //" + "x" * (4096 - len("true //"))},
        {"where": "doc.a in [" + ",".join(map(str, range(1000))) + "]"},
        {"where": "(" * 20 + "doc.a" + ")" * 20},
        {"where": "!" * 18 + "doc.a"},
        {"filters": [{"field": "a", "op": "==", "value": 1}] * 32},
        {"filters": [{"field": "a", "op": "in", "value": list(range(1000))}]},
        {"filters": [{"field": ".".join("a" * 20), "op": "==", "value": "x" * 1024}]},
        {"documents": [f"d{number}" for number in range(100)]},
        {"orderBy": [{"field": "a"}] * 8},
    ],
)
def test_w48_queries_at_a_limit_are_taken(query: dict[str, Any]) -> None:
    found = read_query({"collection": "a", **query}, live=True)
    Predicate(found.parts, found.documents).matches({"id": "d1", "a": 1})


def test_w48_what_takes_too_many_steps_is_not_decided() -> None:
    large = {"l": list(range(10_001)), "id": "d"}
    fits = {"l": list(range(10_000)), "id": "d"}
    for where in ("-1 in doc.l", "doc.l == doc.l", "doc.l.exists(x, x < 0)", "doc.l.exists(x, x == 90000u)"):
        predicate = Predicate([PredicatePart(*compile_cel(where))])
        with pytest.raises(CostExceededError):
            predicate.matches(large)
    assert not Predicate([PredicatePart(*compile_cel("-1 in doc.l"))]).matches(fits)
    assert Predicate([PredicatePart(*compile_cel("doc.l == doc.l"))]).matches(fits)
    denied = AccessRule("!(-1 in doc.l)", "readRule")
    assert denied.allows({}, "read", fits)
    assert not denied.allows({}, "read", large), "a rule that cannot be decided denies"
    assert not Predicate([denied.predicate_part({}, "read")]).matches(large)


def test_without_the_library_only_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra may not be installed: filters work, expressions are answered with 501."""
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    cel_environments.cache_clear()
    try:
        filters = [{"field": "n", "op": ">", "value": 1}]
        predicate = Predicate(read_query({"collection": "c", "filters": filters}, live=True).parts)
        assert predicate.matches({"n": 2})
        with pytest.raises(TailraceError) as refused:
            read_query({"collection": "c", "where": "doc.n > 1"}, live=True)
        assert (refused.value.code, refused.value.status) == ("not_installed", 501)
    finally:
        cel_environments.cache_clear()


def indexable(maker: Maker) -> str:
    """Several conjuncts, as subscriptions have them."""
    pick = maker.random.choice
    parts: list[str] = []
    for _ in range(maker.random.randrange(1, 4)):
        name = f"doc.{pick(NAMES)}"
        parts.append(
            pick(
                (
                    f"{name} {pick(OPERATORS)} {maker.scalar()}",
                    f"{maker.scalar()} {pick(OPERATORS)} {name}",
                    f"{name} in [{maker.scalar()}, {maker.scalar()}]",
                    f"{maker.scalar()} in {name}",
                    f"{name}.startsWith({quoted(pick(TEXTS))})",
                    f"has({name})",
                    f"!{name}",
                    name,
                    f"({name} == {maker.scalar()} || {name} == {maker.scalar()})",
                )
            )
        )
    return " && ".join(parts)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_w21_the_index_finds_what_evaluating_everything_finds(seed: int) -> None:
    maker = Maker(seed)
    index: PredicateIndex[Predicate] = PredicateIndex(10_000)
    predicates: dict[bytes, Predicate] = {}
    for _ in range(120):
        if predicates and maker.random.random() < 0.2:
            index.discard(predicates.pop(maker.random.choice(list(predicates))))
        else:
            try:
                predicate = Predicate([PredicatePart(*compile_cel(indexable(maker)))])
            except TailraceError:
                continue
            if predicate.hash not in predicates:
                predicates[predicate.hash] = predicate
                index.add(predicate)
        document = maker.document()
        index.sample.add(document)
        found: ProbeResult[Predicate] = ProbeResult()
        index.probe(document, found)
        candidates = found.sure | found.maybe
        assert candidates <= set(predicates.values()), "nothing that was taken out comes back"
        matching = {predicate for predicate in predicates.values() if predicate.matches(document)}
        assert matching <= candidates
        assert found.sure | {one for one in found.maybe if one.lookups == EITHER} <= matching
        assert not found.sure & found.maybe


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_w21_many_changes_together_are_what_they_are_one_by_one(seed: int) -> None:
    maker = Maker(seed)
    matcher: Matcher[int] = Matcher(10_000)
    subscribed: dict[int, Interest] = {}
    for number in range(100):
        try:
            interest = Interest(Predicate([PredicatePart(*compile_cel(indexable(maker)))]), None)
        except TailraceError:
            continue
        subscribed[number] = interest
        matcher.add(interest, number)
    for _ in range(2):
        changes: list[Change] = []
        for seq in range(BATCH_MIN + 8):
            before, after = (maker.document() if maker.random.random() < 0.8 else None for _ in range(2))
            changes.append(change_of(seq, before, after if before is not None else maker.document()))
        together = matcher.match_batch(changes)
        for change, found in zip(changes, together, strict=True):
            hits = matcher.hits
            alone = matcher.match(change)
            assert told(found) == told(alone)
            events = {number: one.classify(change) for number, one in subscribed.items()}
            assert told(found) == {number: event for number, event in events.items() if event is not None}
            different = {subscribed[number].predicate.hash for number in told(found)}
            assert matcher.hits - hits == len(different), "one that many watch is found once"
        for number in maker.random.sample(sorted(subscribed), 10):
            matcher.discard(subscribed.pop(number), number)


def told(found: MatchResult[int]) -> dict[int, tuple[str, str]]:
    pairs = [(who, (one.op, one.reason)) for one in found.matches for who in one.subscribers]
    assert len(pairs) == len(dict(pairs)), "everybody is told once"
    return dict(pairs)


def test_intervals_find_exactly_those_that_hold_the_point() -> None:
    chance = random.Random(5)
    intervals: IntervalIndex[int] = IntervalIndex()
    known: dict[int, tuple[float, float]] = {}
    points = [0.0, -0.0, 1.0, -1.0, 5e-324, 1e308, float("inf"), float("-inf")]
    points += [chance.uniform(-9, 9) for _ in range(40)]
    for number in range(600):
        if known and chance.random() < 0.3:
            gone = chance.choice(list(known))
            intervals.discard(*known.pop(gone), gone)
            intervals.discard(0.5, 0.75, gone)
        else:
            low, high = sorted((chance.choice(points), chance.choice(points)))
            known[number] = (low, high)
            intervals.add(low, high, number)
        point = chance.choice(points)
        expected = sorted(key for key, (low, high) in known.items() if low <= point <= high)
        assert sorted(intervals.containing(point)) == expected
    assert len(intervals) == len(known)
