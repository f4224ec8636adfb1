"""What an expression may cost: steps and bytes are counted together, on every way of evaluating it."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.watch_changes import change_of
from tailrace.common.errors import TailraceError
from tailrace.watch.access_rules import AccessRule
from tailrace.watch.cel import compile_cel
from tailrace.watch.evaluation_cost import CostExceededError, StepBudget
from tailrace.watch.matcher import Interest, Matcher
from tailrace.watch.predicate import Predicate, PredicatePart

# The budget is meant to be used up in about 5 ms. Machines differ, and so do patterns to search for.
CPU_S_MAX = 0.1
MEMORY_BYTES_MAX = 64 * 1024 * 1024

LARGE: dict[str, Any] = {
    "s": "a" * 500_000,
    "t": "a" * 100_000 + "b" + "a" * 100_000,
    "u": "a" * 1_100 + "b" + "a" * 1_100,
    "l": list(range(1_000)),
    "m": list(range(9_000)),
    "o": {str(number): [number] * 10 for number in range(3_000)},
    "w": ["a" * 2_400] * 150,
    "n": 5,
    "id": "d1",
}
HOSTILE = (
    "doc.l.exists(x, size(doc.s + doc.s) < 0)",
    "doc.l.exists(x, size(doc.m + doc.m) < 0)",
    "doc.l.exists(x, doc.s + 'a' == doc.s + 'b')",
    "doc.l.exists(x, doc.s.contains(doc.t))",
    "doc.l.exists(x, doc.s.endsWith(doc.t))",
    "doc.l.exists(x, doc.s < doc.s)",
    "doc.l.exists(x, doc.s != doc.s)",
    "doc.l.exists(x, -1 in doc.m)",
    "doc.l.exists(x, doc.m != doc.m)",
    "doc.l.exists(x, doc.o != doc.o)",
    "doc.w.exists(x, x.contains(doc.u))",
    "doc.w.all(x, x.contains(doc.u)) || doc.w.all(x, x.contains(doc.u)) || doc.w.all(x, x.contains(doc.u))",
    " || ".join(["-1 in doc.m"] * 30),
    " || ".join(["doc.o != doc.o"] * 30),
    " || ".join(["doc.s.contains(doc.t)"] * 30),
    # Of these some part is left to the library.
    "doc.l.exists(x, size(doc.s + string(x)) < 0)",
    "string(doc.n) == '6' || doc.s.contains(doc.t)",
    "doc.l.exists(x, uint(x) == 1u && doc.m == doc.m)",
    "{'a': doc.o} == {'a': doc.o, 'b': 1}",
    "doc == {'a': doc} || string(doc.n) == '6'",
    "string(doc.n) == '6' || (doc.m + doc.m + doc.m + doc.m) == doc.m",
    "timestamp(doc.s + doc.s) < timestamp(doc.s + doc.s + doc.s)",
)


def balanced(part: str, times: int) -> str:
    """A sum that is as flat as it can be: an expression is at most 20 levels deep."""
    if times == 1:
        return part
    return f"({balanced(part, times // 2)} + {balanced(part, times - times // 2)})"


def cpu_s(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def decide(predicate: Predicate, document: dict[str, Any]) -> bool | None:
    """None: it cannot be afforded."""
    try:
        return predicate.matches(document)
    except CostExceededError:
        return None


@pytest.mark.parametrize("source", [*HOSTILE, f"size({balanced('doc.s', 120)}) > 0"])
def test_an_expression_is_cut_off_at_its_budget(source: str) -> None:
    predicate = Predicate([PredicatePart(*compile_cel(source))])
    decide(predicate, {"id": "d0"})  # the library plans a program at its first evaluation
    assert cpu_s(lambda: decide(predicate, LARGE)) < CPU_S_MAX


@pytest.mark.parametrize("source", [*HOSTILE, f"size({balanced('doc.s', 120)}) > 0"])
def test_an_expression_takes_bounded_memory(source: str) -> None:
    predicate = Predicate([PredicatePart(*compile_cel(source))])
    tracemalloc.start()
    try:
        decide(predicate, LARGE)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_the_budget_is_for_all_parts_of_a_predicate_together() -> None:
    once = Predicate([PredicatePart(*compile_cel("!(-1 in doc.m)"))])
    twice = Predicate(
        [PredicatePart(*compile_cel("!(-1 in doc.m)")), PredicatePart(*compile_cel("!(-2 in doc.m)"))]
    )
    assert decide(once, LARGE) is True
    assert decide(twice, LARGE) is None, "9,000 steps, twice"
    assert decide(once, LARGE) is True, "the next evaluation has its own budget"


def test_a_rule_that_cannot_be_afforded_denies_and_leaves_the_query_its_budget() -> None:
    rule = AccessRule("doc.l.all(x, !(-1 in doc.m))", "readRule")
    assert not rule.allows({}, "read", LARGE)
    assert rule.allows({}, "read", {**LARGE, "l": [1]})
    assert decide(Predicate([rule.predicate_part({}, "read")]), LARGE) is False


@pytest.mark.parametrize(
    "source",
    [
        "doc.text.contains('needle') && doc.text.contains('hay')",
        "doc.text + '!' != doc.text",
        "doc.tags.exists(x, x == 'tag-999')",
        "doc.items.exists(x, x.name == 'item 99' && x.price > 98.0)",
        "'tag-5' in doc.tags && doc.text.endsWith('needle')",
        # With some part that is left to the library.
        "string(doc.n) == '5' && doc.text.contains('needle')",
        "doc.items.exists(x, int(x.price) == 99)",
        "type(doc.tags) == list && size(doc.tags) == 1000",
        "doc.tags.exists(x, string(x) == 'tag-999')",
        "{'n': doc.n}.n == 5",
    ],
)
def test_ordinary_expressions_on_large_documents_are_decided(source: str) -> None:
    document = {
        "text": "hay " * 50_000 + "needle",
        "tags": [f"tag-{number}" for number in range(1_000)],
        "items": [{"name": f"item {number}", "price": float(number)} for number in range(100)],
        "unused": [{"n": number} for number in range(20_000)],
        "n": 5,
    }
    assert decide(Predicate([PredicatePart(*compile_cel(source))]), document) is True


class Maker:
    """Expressions that combine what costs something, over documents of every size up to the largest."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._inside = False

    def document(self) -> dict[str, Any]:
        return {
            "s": "a" * self._size(1_000_000),
            "t": "a" * self._size(300_000) + "b" + "a" * self._size(1_000),
            "l": [self._item() for _ in range(self._size(5_000))],
            "m": list(range(self._size(100_000))),
            "o": {str(number): self._item() for number in range(self._size(20_000))},
            "n": self.random.randrange(10),
            "id": "d1",
        }

    def _size(self, most: int) -> int:
        return int(most ** self.random.random())

    def _item(self) -> Any:
        return self.random.choice((1, 2.5, "text", "a" * self._size(100), [1, 2], {"k": [1]}, None))

    def truth(self, depth: int) -> str:
        pick = self.random.choice
        if depth == 0:
            return pick(("has(doc.s)", "doc.n == 5", "true"))
        forms: list[Callable[[], str]] = [
            lambda: f"({self.truth(depth - 1)} {pick(('||', '&&'))} {self.truth(depth - 1)})",
            lambda: f"!({self.truth(depth - 1)})",
            lambda: (
                f"({self.text(depth - 1)}).{pick(('contains', 'startsWith', 'endsWith'))}({self.text(1)})"
            ),
            lambda: f"({self.text(depth - 1)} {pick(('==', '!=', '<', '>='))} {self.text(depth - 1)})",
            lambda: f"({self.many(depth - 1)} {pick(('==', '!='))} {self.many(depth - 1)})",
            lambda: f"({pick(('-1', '[1]', 'doc.s', 'doc.l'))} in {self.many(depth - 1)})",
            lambda: f"size({pick((self.text, self.many))(depth - 1)}) > 3",
            lambda: f"{pick(('doc.o', '{doc.n: doc.l}'))} == doc.o",
            lambda: f"{pick(('int', 'double', 'timestamp', 'duration'))}({self.text(depth - 1)}) == null",
        ]
        if not self._inside:
            forms += [self._loop] * 3
        return pick(forms)()

    def _loop(self) -> str:
        over = self.many(1)
        self._inside = True
        try:
            condition = self.truth(2)
        finally:
            self._inside = False
        return f"{over}.{self.random.choice(('exists', 'all', 'exists_one'))}(x, {condition})"

    def text(self, depth: int) -> str:
        pick = self.random.choice
        if depth == 0 or self.random.random() < 0.3:
            return pick(("doc.s", "doc.t", "'aaab'", "string(doc.n)", "x" if self._inside else "doc.s"))
        return f"({self.text(depth - 1)} + {self.text(depth - 1)})"

    def many(self, depth: int) -> str:
        pick = self.random.choice
        if depth == 0 or self.random.random() < 0.4:
            return pick(("doc.l", "doc.m", "[doc.l, doc.s]", "doc.l"))
        return f"({self.many(depth - 1)} + {self.many(depth - 1)})"


def costs_no_more_than_allowed(seed: int) -> bool:
    """False: the checker does not take the expression."""
    maker = Maker(seed)
    source = maker.truth(4)
    try:
        predicate = Predicate([PredicatePart(*compile_cel(source))])
    except TailraceError:
        return False
    decide(predicate, {"id": "d0"})
    document = maker.document()
    spent = cpu_s(lambda: decide(predicate, document))
    assert spent < CPU_S_MAX, (seed, source, {name: _length(value) for name, value in document.items()})
    return True


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | dict) else 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_no_generated_expression_exceeds_its_budget(seed: int) -> None:
    costs_no_more_than_allowed(seed)


@pytest.mark.nightly
def test_no_generated_expression_exceeds_its_budget_of_many() -> None:
    assert sum(map(costs_no_more_than_allowed, range(10_000))) > 5_000


# -- live matching -------------------------------------------------------------------------------------------


def test_one_change_against_a_thousand_costly_subscriptions_is_bounded() -> None:
    """Those that need more than is left are postponed; the cheap ones are decided all the same."""
    turn = StepBudget(40_000)
    matcher: Matcher[str] = Matcher(10_000, turn)
    for number in range(1_000):
        costly = Predicate([PredicatePart(*compile_cel(f"!doc.l.exists(x, x == {-1 - number})"))])
        matcher.add(Interest(costly, None), f"costly-{number}")
    for number in range(50):
        cheap = Predicate([PredicatePart(*compile_cel(f"doc.n + {number} == {5 + number}"))])
        matcher.add(Interest(cheap, None), f"cheap-{number}")
    change = change_of(1, None, LARGE)
    found = matcher.match(change)
    matched = {subscriber for match in found.matches for subscriber in match.subscribers}
    assert not found.too_costly
    assert {f"cheap-{number}" for number in range(50)} <= matched
    assert len(matched | found.postponed) == 1_050
    assert 5 <= 1_000 - len(found.postponed) <= 40_000 // 1_000
    assert cpu_s(lambda: matcher.match(change)) < CPU_S_MAX
    turn.refill()
    again = matcher.match(change)
    assert len(again.postponed) == len(found.postponed), "the next turn has its own steps"


def test_an_expression_that_never_fits_is_too_costly_and_not_postponed() -> None:
    turn = StepBudget(40_000)
    matcher: Matcher[str] = Matcher(10_000, turn)
    matcher.add(
        Interest(Predicate([PredicatePart(*compile_cel("doc.l.all(x, !(-1 in doc.m))"))]), None), "one"
    )
    found = matcher.match(change_of(1, None, LARGE))
    assert (found.too_costly, found.postponed) == ({"one"}, set())


def test_a_read_rule_is_not_taken_for_a_refusal_when_it_is_postponed() -> None:
    """A rule that cannot be afforded denies; one that is postponed has not been decided."""
    turn = StepBudget(10)
    matcher: Matcher[str] = Matcher(10_000, turn)
    rule = AccessRule("!doc.l.exists(x, x == -1)", "readRule").predicate_part({}, "read")
    matcher.add(Interest(Predicate([rule]), Predicate([rule])), "one")
    found = matcher.match(change_of(1, None, LARGE))
    assert (found.matches, found.postponed) == ([], {"one"})


@pytest.mark.parametrize("elements", [list(range(140_000)), [5] * 140_000])
def test_looking_for_elements_of_long_lists_is_bounded(elements: list[int]) -> None:
    """Lists are gone through once, however many buckets of the index ask for their elements."""
    matcher: Matcher[int] = Matcher(10_000, StepBudget(40_000))
    for number in range(1_000):
        where = f"{number // 10} in doc.l && {number % 10} in doc.m"
        matcher.add(Interest(Predicate([PredicatePart(*compile_cel(where))]), None), number)
    change = change_of(1, None, {"l": elements, "m": elements})
    assert change.after is not None, "it is parsed before"
    assert cpu_s(lambda: matcher.match(change)) < 3 * CPU_S_MAX


def test_the_sample_of_an_index_keeps_no_large_documents() -> None:
    matcher: Matcher[int] = Matcher(10_000)
    matcher.add(Interest(Predicate([PredicatePart(*compile_cel("doc.n == 5"))]), None), 1)
    for document in ({"n": 5}, {"n": 5, "s": "x" * 20_000}, {"n": 5, "l": list(range(100))}):
        matcher.match(change_of(1, None, document))
    assert len(matcher.index.sample) == 2
