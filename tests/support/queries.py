"""Random records and queries over one search configuration that has a field of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tailrace.schema.search_config import SearchConfig, parse_search_config
from tailrace.search.records import Value, field_values, tokenize_text

VERSION = 1


def _at(pointer: str) -> list[dict[str, object]]:
    return [{"version": 1, "jsonPointer": pointer}]


SEARCH_BODY: dict[str, Any] = {
    "primaryTimestampField": "at",
    "fields": {
        "id": {"kind": "keyword", "bindings": _at("/id"), "exact": True, "prefix": True, "exists": True},
        "service": {
            "kind": "keyword",
            "normalizer": "lowercase_v1",
            "bindings": _at("/service"),
            "exact": True,
            "prefix": True,
        },
        "status": {"kind": "integer", "bindings": _at("/status"), "exact": True, "column": True},
        "ratio": {"kind": "float", "bindings": _at("/ratio"), "column": True},
        "at": {"kind": "date", "bindings": _at("/at"), "column": True, "exists": True},
        "ok": {"kind": "bool", "bindings": _at("/ok"), "exact": True},
        "plan": {"kind": "keyword", "bindings": _at("/user/plan"), "exact": True},
        "message": {
            "kind": "text",
            "analyzer": "unicode_word_v1",
            "bindings": _at("/message"),
            "positions": True,
            "exists": True,
        },
        "note": {"kind": "text", "analyzer": "unicode_word_v1", "bindings": _at("/note"), "exists": True},
        "nowhere": {
            "kind": "keyword",
            "bindings": [{"version": 9, "jsonPointer": "/id"}],
            "exact": True,
            "prefix": True,
        },
    },
    "aliases": {"svc": "service"},
    "defaultFields": [{"field": "message", "boost": 2}, "service"],
}
CONFIG: SearchConfig = parse_search_config(SEARCH_BODY)

LEAVES: list[object] = [
    None,
    True,
    False,
    "true",
    "FALSE",
    0,
    -0.0,
    5,
    5.0,
    5.5,
    "5",
    "-5",
    500,
    2**63,
    2**63 - 1,
    -(2**63),
    1e300,
    "1e3",
    "x",
    "X",
    "xy",
    "Straße",
    "STRASSE",
    "😀",
    "a\u0000b",
    "\ud800",
    "�",
    "",
    "checkout",
    "Checkout failed",
    "failed checkout",
    "check",
    "2026-01-01",
    "2026-01-01T00:00:00Z",
    "2026-01-01T01:00:00.5+01:00",
    1767225600000,
    "1767225600000",
    "never",
    [],
    {},
    {"id": "x"},
]
leaves = st.sampled_from(LEAVES)
members = st.one_of(leaves, leaves, leaves, st.recursive(leaves, lambda inner: st.lists(inner, max_size=3)))


def _record(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


objects = _record(
    id=members,
    service=members,
    status=members,
    ratio=members,
    at=members,
    ok=members,
    message=members,
    note=members,
    user=st.one_of(leaves, _record(plan=members)),
    other=members,
)
records: st.SearchStrategy[Any] = st.one_of(objects, objects, objects, objects, members)


def payload_of(record: object, *, ascii_only: bool = True) -> bytes:
    """As a client might have written it; halves of surrogate pairs only exist as escapes."""
    text = json.dumps(record, ensure_ascii=ascii_only)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def quoted(text: str) -> str:
    """A value for a query, whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


class Question(NamedTuple):
    """A query text, and the plain truth about it: whether it holds for a record."""

    text: str
    holds: Callable[[object], bool]


def _some(name: str, check: Callable[[Any], bool]) -> Callable[[object], bool]:
    def holds(record: object) -> bool:
        found: list[Value] = field_values(record, CONFIG.fields[name], VERSION)
        return any(check(value) for value in found)

    return holds


def _either(*choices: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda record: any(choice(record) for choice in choices)


def _says(name: str, *tokens: str) -> Callable[[object], bool]:
    return _some(name, lambda value: set(tokens) <= set(tokenize_text(value)))


FILTERS: list[Question] = [
    Question("id:x", _some("id", lambda value: value == "x")),
    Question('id:""', _some("id", lambda value: value == "")),
    Question("id:check*", _some("id", lambda value: value == "check*")),
    Question('id:"😀"', _some("id", lambda value: value == "😀")),
    Question('id:"�"', _some("id", lambda value: value == "�")),
    Question("svc:X", _some("service", lambda value: value == "x")),
    Question("service:=Straße", _some("service", lambda value: value == "straße")),
    Question("status:5", _some("status", lambda value: value == 5)),
    Question("status:>=-5", _some("status", lambda value: value >= -5)),
    Question("status:<500", _some("status", lambda value: value < 500)),
    Question("ratio:>5", _some("ratio", lambda value: value > 5)),
    Question("ratio:<=5.5", _some("ratio", lambda value: value <= 5.5)),
    Question("ratio:0", _some("ratio", lambda value: value == 0)),
    Question('at:>="2026-01-01T00:00:00Z"', _some("at", lambda value: value >= 1767225600000)),
    Question("at:2026-01-01", _some("at", lambda value: value == 1767225600000)),
    Question("ok:True", _some("ok", lambda value: value is True)),
    Question("plan:x", _some("plan", lambda value: value == "x")),
    Question("has:id", _some("id", lambda value: True)),
    Question("has:at", _some("at", lambda value: True)),
    Question("has:message", _some("message", lambda value: True)),
    Question("nowhere:x", lambda record: False),
    Question("has:nowhere", lambda record: False),
]
SEARCHES: list[Question] = [
    *(question for question in FILTERS if not question.text.endswith("*")),
    Question("svc:Che*", _some("service", lambda value: value.startswith("che"))),
    Question("id:*", _some("id", lambda value: True)),
    Question("message:checkout", _says("message", "checkout")),
    Question("note:failed-checkout", _says("note", "checkout", "failed")),
    Question(
        "message:check*",
        _some("message", lambda value: any(token.startswith("check") for token in tokenize_text(value))),
    ),
    Question(
        'message:"checkout failed"',
        _some("message", lambda value: tokenize_text(value) == ["checkout", "failed"]),
    ),
    Question("x", _either(_says("message", "x"), _some("service", lambda value: value == "x"))),
    Question(
        '"Checkout failed"',
        _either(
            _some("message", lambda value: tokenize_text(value) == ["checkout", "failed"]),
            _some("service", lambda value: value == "checkout failed"),
        ),
    ),
]


def _negated(question: Question, sign: str) -> Question:
    return Question(f"{sign}({question.text})", lambda record: not question.holds(record))


def _joined(parts: list[Question], word: str) -> Question:
    text = f" {word} ".join(f"({part.text})" for part in parts)
    if word == "OR":
        return Question(text, lambda record: any(part.holds(record) for part in parts))
    return Question(text, lambda record: all(part.holds(record) for part in parts))


def questions(clauses: list[Question]) -> st.SearchStrategy[Question]:
    """Boolean trees over some clauses, with nested and double negation."""
    return st.recursive(
        st.sampled_from(clauses),
        lambda inner: st.one_of(
            st.builds(_negated, inner, st.sampled_from(["-", "NOT ", "not ", "- NOT -"])),
            st.builds(_joined, st.lists(inner, min_size=2, max_size=3), st.sampled_from(["OR", "AND", ""])),
        ),
        max_leaves=8,
    )
