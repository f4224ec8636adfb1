"""CEL's own conformance cases, as far as the language has them, for the library and our closures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tailrace.watch.cel import compile_cel
from tailrace.watch.evaluator import EvaluationError, NotCompilableError, compile_value
from tailrace.watch.predicate import Predicate, PredicatePart

CORPUS = Path(__file__).parents[2] / "corpus" / "cel"


class Case(NamedTuple):
    suite: str
    name: str
    expression: str
    value: bool | str
    document: dict[str, Any]


def cases() -> list[Case]:
    found: list[Case] = []
    for path in sorted(CORPUS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, expression, expected, *document = json.loads(line)
            found.append(Case(path.stem, name, expression, expected, document[0] if document else {}))
    return found


@pytest.mark.parametrize("suite", sorted(path.stem for path in CORPUS.glob("*.jsonl")))
def test_w15_conformance_cases_hold_for_the_library_and_for_closures(suite: str) -> None:
    wrong: list[tuple[str, str, object, object]] = []
    lowered = 0
    for case in cases():
        if case.suite != suite:
            continue
        node, program = compile_cel(case.expression)
        kind, found = program.value(doc=case.document)
        library = found if kind == "BOOL" else "error"
        if library != case.value:
            wrong.append((case.name, "library", library, case.value))
        try:
            evaluate = compile_value(node)
        except NotCompilableError:
            closure: object = library
        else:
            lowered += 1
            try:
                closure = evaluate(case.document, None)
            except EvaluationError:
                closure = "error"
        if closure != case.value:
            wrong.append((case.name, "closure", closure, case.value))
        if Predicate([PredicatePart(node, program)]).matches(case.document) is not (case.value is True):
            wrong.append((case.name, "predicate", "differs", case.value))
    assert wrong == []
    assert lowered > 0


def test_w15_every_case_has_a_name_of_its_own() -> None:
    names = [(case.suite, case.name) for case in cases()]
    assert len(names) == len(set(names))
    assert len(names) > 250
