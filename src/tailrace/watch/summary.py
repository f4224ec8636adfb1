"""Summaries of subscriptions: what a matcher outside the gateway has to know of them, and no more.

The read rule is in it as what it comes to for the subscriber: of their claims only the values that the rule
compares with are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tailrace.watch import trees
from tailrace.watch.cel import CelProgram, compile_cel
from tailrace.watch.lower import NotCompilableError, compile_truth
from tailrace.watch.matcher import Interest
from tailrace.watch.predicate import Predicate, PredicatePart

SUMMARIES_PREFIX: Final = "__subs__/"
SUMMARY_TTL_MS: Final = 90_000


class EncodedPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a predicate. `text` is there where the library has to evaluate it."""

    tree: list[Any]
    text: str | None = None
    variables: dict[str, Any] | None = None  # of a rule: what it knows beside the document


class SubscriptionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription."""

    database: str
    collection: str
    predicate: str
    predicateHash: str  # noqa: N815 - the name on the wire
    parts: list[EncodedPart]
    ruleInputs: EncodedPart | None  # noqa: N815 - as above
    documents: list[str] | None
    priority: str
    position: list[int]
    expires: int


def encode_predicate_part(part: PredicatePart) -> EncodedPart:
    try:
        compile_truth(part.node)
    except NotCompilableError:
        assert part.program is not None, "what cannot be lowered came as text"
        return EncodedPart(trees.encode_expression(part.node), part.program.source, part.variables)
    return EncodedPart(trees.encode_expression(part.node))


def decode_predicate_part(form: EncodedPart) -> PredicatePart:
    program: CelProgram | None = None
    if form.text is not None:
        program = compile_cel(form.text, rule=form.variables is not None)[1]
    return PredicatePart(trees.decode_expression(form.tree), program, form.variables)


def build_predicate(
    parts: Sequence[PredicatePart], rule: PredicatePart | None, documents: frozenset[str] | None
) -> Predicate:
    """Query and rule in one, as the gateway puts them together."""
    return Predicate([*parts, rule] if rule is not None else parts, documents)


def interest_from_summary(summary: SubscriptionSummary) -> Interest:
    """The subscription as the matcher takes it."""
    rule = None if summary.ruleInputs is None else decode_predicate_part(summary.ruleInputs)
    documents = None if summary.documents is None else frozenset(summary.documents)
    whole = build_predicate([decode_predicate_part(form) for form in summary.parts], rule, documents)
    return Interest(whole, None if rule is None else Predicate([rule]))
