"""Summaries of subscriptions: what a matcher outside the gateway has to know of them, and no more.

The read rule is in it as what it comes to for the subscriber: of their claims only the values that the rule
compares with are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tailrace.watch import trees
from tailrace.watch.cel import Program, compile_text
from tailrace.watch.lower import NotLoweredError, truth
from tailrace.watch.matcher import Interest
from tailrace.watch.predicate import Part, Predicate

SUBS: Final = "__subs__/"
TTL_MS: Final = 90_000


class PartForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a predicate. `text` is there where the library has to evaluate it."""

    tree: list[Any]
    text: str | None = None
    variables: dict[str, Any] | None = None  # of a rule: what it knows beside the document


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription."""

    database: str
    collection: str
    predicate: str
    predicateHash: str  # noqa: N815 - the name on the wire
    parts: list[PartForm]
    ruleInputs: PartForm | None  # noqa: N815 - as above
    documents: list[str] | None
    priority: str
    position: list[int]
    expires: int


def form_of(part: Part) -> PartForm:
    try:
        truth(part.node)
    except NotLoweredError:
        assert part.program is not None, "what cannot be lowered came as text"
        return PartForm(trees.dump(part.node), part.program.source, part.variables)
    return PartForm(trees.dump(part.node))


def part_of(form: PartForm) -> Part:
    program: Program | None = None
    if form.text is not None:
        program = compile_text(form.text, rule=form.variables is not None)[1]
    return Part(trees.load(form.tree), program, form.variables)


def predicate_of(parts: Sequence[Part], rule: Part | None, documents: frozenset[str] | None) -> Predicate:
    """Query and rule in one, as the gateway puts them together."""
    return Predicate([*parts, rule] if rule is not None else parts, documents)


def interest_of(summary: Summary) -> Interest:
    """The subscription as the matcher takes it."""
    rule = None if summary.ruleInputs is None else part_of(summary.ruleInputs)
    documents = None if summary.documents is None else frozenset(summary.documents)
    whole = predicate_of([part_of(form) for form in summary.parts], rule, documents)
    return Interest(whole, None if rule is None else Predicate([rule]))
