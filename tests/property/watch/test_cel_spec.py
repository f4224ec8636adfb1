"""The public conformance cases of CEL: what is within the language has their value; the rest is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tailrace.common.errors import TailraceError
from tailrace.watch.cel import compile_cel
from tailrace.watch.evaluator import EvaluationError, NotCompilableError, compile_value
from tailrace.watch.predicate import Predicate, PredicatePart

CASES = Path(__file__).parents[2] / "conformance" / "cel" / "cases.jsonl"
SUITES = ("basic", "comparisons", "conversions", "fields", "fp_math", "integer_math", "lists", "logic")
SUITES += ("macros", "parse", "string", "timestamps")


# The library takes `{0: 1, 0u: 2}`, where the suite wants an error; and the library decides here.
NOT_IN_THE_LIBRARY = {"qualified_identifier_resolution/map_value_repeat_key_heterogeneous"}


class Case(NamedTuple):
    suite: str
    name: str
    expression: str
    value: Any  # as proto3 JSON; None is an error


class OutsideError(Exception):
    """Why a case is not about the language."""


def cases() -> list[Case]:
    return [Case(*json.loads(line)) for line in CASES.read_text(encoding="utf-8").splitlines()]


def literal(given: dict[str, Any]) -> str:
    ((kind, found),) = given.items()
    if kind == "boolValue":
        return str(found).lower()
    if kind == "int64Value":
        return f"({found})"
    if kind == "uint64Value":
        return f"{found}u"
    if kind == "doubleValue":
        named = {"Infinity": "(1.0 / 0.0)", "-Infinity": "(-1.0 / 0.0)"}
        return named.get(str(found)) or f"({float(found)!r})"
    if kind == "stringValue":
        return json.dumps(found, ensure_ascii=False)
    if kind == "nullValue":
        return "null"
    if kind == "typeValue":
        return found
    if kind == "listValue":
        return "[" + ", ".join(literal(one) for one in found.get("values", [])) + "]"
    if kind == "mapValue":
        pairs = [f"{literal(one['key'])}: {literal(one['value'])}" for one in found.get("entries", [])]
        return "{" + ", ".join(pairs) + "}"
    raise OutsideError("bytes" if kind == "bytesValue" else "messages")


def predicate_of(case: Case) -> tuple[str, bool | None]:
    """The case as something that is true, false, or None for an error."""
    if case.value == "bindings":
        raise OutsideError("variables of its own")
    if case.name in NOT_IN_THE_LIBRARY:
        raise OutsideError("the library says otherwise")
    if case.value is None:
        return f"({case.expression}) == ({case.expression})", None
    if "boolValue" in case.value:
        return case.expression, case.value["boolValue"]
    if case.value == {"doubleValue": "NaN"}:
        return f"({case.expression}) != ({case.expression})", True
    return f"({case.expression}) == {literal(case.value)}", True


def reason_of(refused: TailraceError) -> str:
    if refused.code == "query_too_complex":
        return "too complex"
    if "overload" in refused.message or "undeclared" in refused.message:
        return "types or names that do not fit"
    if "values of this type" in refused.message or "Unicode text" in refused.message:
        return "bytes"
    return "messages" if "messages" in refused.message else "functions and forms that it has not"


def library_says(text: str) -> tuple[bool | None, Any, Any]:
    try:
        node, program = compile_cel(text)
    except TailraceError as refused:
        raise OutsideError(reason_of(refused)) from None
    kind, found = program.value(doc={})
    return found if kind == "BOOL" else None, node, program


@pytest.mark.parametrize("suite", SUITES)
def test_w15_public_cases_hold_for_the_library_and_for_closures(suite: str) -> None:
    wrong: list[tuple[str, str, object]] = []
    outside: Counter[str] = Counter()
    inside = 0
    for case in cases():
        if case.suite != suite:
            continue
        try:
            text, expected = predicate_of(case)
            library, node, program = library_says(text)
        except OutsideError as why:
            outside[str(why)] += 1
            continue
        inside += 1
        if library is not expected:
            wrong.append((case.name, text, library))
        try:
            closure: object = compile_value(node)({}, None)
        except NotCompilableError:
            closure = expected
        except EvaluationError:
            closure = None
        if (closure if type(closure) is bool else None) is not expected:
            wrong.append((case.name, text, closure))
        if Predicate([PredicatePart(node, program)]).matches({}) is not (expected is True):
            wrong.append((case.name, text, "the predicate says otherwise"))
    assert wrong == []
    assert (suite, inside, dict(outside)) == (suite, *INSIDE[suite])


# How many cases of a suite are within the language, and why the others are not.
INSIDE: dict[str, tuple[int, dict[str, int]]] = {
    "basic": (32, {"bytes": 3, "types or names that do not fit": 4, "variables of its own": 4}),
    "comparisons": (
        146,
        {
            "bytes": 17,
            "functions and forms that it has not": 146,
            "messages": 27,
            "types or names that do not fit": 16,
            "variables of its own": 54,
        },
    ),
    "conversions": (84, {"bytes": 8, "functions and forms that it has not": 17}),
    "fields": (
        37,
        {
            "bytes": 1,
            "functions and forms that it has not": 9,
            "the library says otherwise": 1,
            "variables of its own": 12,
        },
    ),
    "fp_math": (29, {"types or names that do not fit": 1}),
    "integer_math": (61, {"types or names that do not fit": 3}),
    "lists": (21, {"functions and forms that it has not": 18}),
    "logic": (21, {"types or names that do not fit": 9}),
    "macros": (29, {"functions and forms that it has not": 15}),
    "parse": (
        106,
        {
            "bytes": 64,
            "functions and forms that it has not": 1,
            "too complex": 4,
            "types or names that do not fit": 23,
            "variables of its own": 21,
        },
    ),
    "string": (36, {"bytes": 6, "functions and forms that it has not": 9}),
    "timestamps": (50, {"functions and forms that it has not": 25, "variables of its own": 1}),
}
