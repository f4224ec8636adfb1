"""Laws of the query language: total, boolean, and the same by every way of deciding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.queries import (
    CONFIG,
    FILTERS,
    LEAVES,
    SEARCHES,
    VERSION,
    Question,
    payload_of,
    questions,
    quoted,
    records,
)
from tailrace.common.errors import TailraceError
from tailrace.schema.json_values import decode_payload
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import SearchConfig, parse_search_config
from tailrace.search.matching import Matcher, evaluate_record
from tailrace.search.query_language import (
    FILTER_DIALECT,
    SEARCH_DIALECT,
    Dialect,
    bind_query,
    parse_query_text,
)
from tailrace.search.records import FieldExtractor, RecordView, field_values, to_string

SOME = settings(max_examples=100, deadline=None)
MANY = settings(max_examples=20_000, deadline=None)

batches = st.lists(records, min_size=1, max_size=8)
SYNTAX = '():"\\-<>=* \n.abANDORNOThas1é😀'
texts = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=()), max_size=60),
    st.text(alphabet=SYNTAX, max_size=60),
    st.lists(
        st.sampled_from(
            [
                "id:",
                "x",
                '"',
                "(",
                ")",
                "-",
                "OR",
                "AND",
                "not",
                "has:",
                "status:>=",
                "5",
                "*",
                ":",
                "\\",
                " ",
            ]
        ),
        max_size=40,
    ).map(" ".join),
    questions(SEARCHES).map(lambda question: question.text),
)


def check_every_way(question: Question, batch: list[Any], dialect: Dialect, ascii_only: bool) -> None:
    bound = bind_query(question.text, CONFIG, dialect)
    matcher = Matcher(bound, CONFIG, VERSION)
    for record in batch:
        payload = payload_of(record, ascii_only=ascii_only)
        expected = question.holds(decode_payload(payload))
        assert evaluate_record(bound, decode_payload(payload), CONFIG, VERSION) == expected
        assert matcher.matches(payload) == expected
        assert matcher.matches(memoryview(payload)) == expected
        assert matcher.matches_record(decode_payload(payload)) == expected
        assert matcher.matches_record(record) == expected


@SOME
@given(questions(FILTERS), batches, st.booleans())
def test_q1_filters_are_boolean_algebra_on_their_clauses(
    question: Question, batch: list[Any], ascii_only: bool
) -> None:
    check_every_way(question, batch, FILTER_DIALECT, ascii_only)


@SOME
@given(questions(SEARCHES), batches, st.booleans())
def test_q1_searches_are_boolean_algebra_on_their_clauses(
    question: Question, batch: list[Any], ascii_only: bool
) -> None:
    check_every_way(question, batch, SEARCH_DIALECT, ascii_only)


@pytest.mark.nightly
@MANY
@given(questions(SEARCHES), batches, st.booleans())
def test_q1_many_searches_are_boolean_algebra_on_their_clauses(
    question: Question, batch: list[Any], ascii_only: bool
) -> None:
    check_every_way(question, batch, SEARCH_DIALECT, ascii_only)


def test_q1_a_negated_and_keeps_what_either_part_lets_through() -> None:
    """`-( -a:x b:p )` keeps all records with `a:x`, and all without `b:p`."""
    bound = bind_query("-( -id:x status:5 )", CONFIG, FILTER_DIALECT)
    matcher = Matcher(bound, CONFIG, VERSION)
    for record, expected in [
        ({"id": "x", "status": 5}, True),
        ({"id": "x"}, True),
        ({"status": 5}, False),
        ({"id": "y", "status": 5}, False),
        ({"id": ["y", "x"], "status": 5}, True),
        ({}, True),
        (7, True),
        (None, True),
    ]:
        assert evaluate_record(bound, record, CONFIG, VERSION) is expected
        assert matcher.matches_record(record) is expected


def check_extraction(batch: list[Any], ascii_only: bool) -> None:
    registry = Registry(name="s", version=VERSION, search=CONFIG, boundaries=(VersionBoundary(0, VERSION),))
    names = list(CONFIG.fields)
    extractor = FieldExtractor(RecordView(registry), names)
    for record in batch:
        payload = payload_of(record, ascii_only=ascii_only)
        decoded = decode_payload(payload)
        expected = [field_values(decoded, CONFIG.fields[name], VERSION) for name in names]
        # As text, so that 1, 1.0 and True are three different things.
        assert repr([list(values) for values in extractor.row(1, payload)]) == repr(expected)


@SOME
@given(batches, st.booleans())
def test_v1_values_are_the_same_however_a_payload_is_decoded(batch: list[Any], ascii_only: bool) -> None:
    check_extraction(batch, ascii_only)


@pytest.mark.nightly
@MANY
@given(batches, st.booleans())
def test_v1_values_of_many_records_are_the_same(batch: list[Any], ascii_only: bool) -> None:
    check_extraction(batch, ascii_only)


def check_total(text: str) -> None:
    for dialect in (FILTER_DIALECT, SEARCH_DIALECT):
        refusal = _refusal(text, dialect)
        if refusal is not None:
            assert (refusal.status, refusal.code) == (400, dialect.code)
            assert refusal.body()


def _refusal(text: str, dialect: Dialect, config: SearchConfig = CONFIG) -> TailraceError | None:
    try:
        parse_query_text(text, dialect)
        bind_query(text, config, dialect)
    except TailraceError as refusal:
        return refusal
    return None


@SOME
@given(texts)
@example("\\")
@example('"\\')
@example("-" * 100)
@example("(" * 16384)
@example("\x00")
def test_q3_any_text_is_a_query_or_a_refusal(text: str) -> None:
    check_total(text)


@pytest.mark.nightly
@MANY
@given(texts)
def test_q3_any_of_many_texts_is_a_query_or_a_refusal(text: str) -> None:
    check_total(text)


def check_equality(strings: list[str], ascii_only: bool) -> None:
    payloads = [payload_of({"id": text, "service": text}, ascii_only=ascii_only) for text in strings]
    for text in strings:
        # A query comes as UTF-8, so it has no halves of pairs either.
        plain = to_string(text)
        assert plain is not None
        same = [to_string(other) == plain for other in strings]
        folded = [str(to_string(other)).lower() == plain.lower() for other in strings]
        for name, expected in (("id", same), ("service", folded)):
            bound = bind_query(f"{name}:{quoted(plain)}", CONFIG, FILTER_DIALECT)
            matcher = Matcher(bound, CONFIG, VERSION)
            assert [matcher.matches(payload) for payload in payloads] == expected
            found = [evaluate_record(bound, decode_payload(payload), CONFIG, VERSION) for payload in payloads]
            assert found == expected


unicode = st.lists(st.text(alphabet=st.characters(exclude_categories=()), max_size=6), min_size=1, max_size=8)


@SOME
@given(unicode, st.booleans())
@example(["\x00", "", " ", "😀", "\ud83d", "\ude00", "�", '"', "\\", "\n", "İ", "i̇", "ς", "Σ", "σ"], True)
def test_v2_every_string_is_found_by_equality_and_nothing_else(strings: list[str], ascii_only: bool) -> None:
    check_equality(strings, ascii_only)


@pytest.mark.nightly
@MANY
@given(unicode, st.booleans())
def test_v2_each_of_many_strings_is_found_by_equality(strings: list[str], ascii_only: bool) -> None:
    check_equality(strings, ascii_only)


POINTERS = ["", "/", "/a", "/a/a", "/a/0", "/a/1/a", "/0", "/a~1b", "/~0", "/a/-", "/é"]
KINDS = ["keyword", "text", "integer", "float", "date", "bool"]


@st.composite
def configurations(draw: st.DrawFn) -> SearchConfig:
    """Any kinds at any pointers, over versions that may not have come yet."""
    fields: dict[str, dict[str, Any]] = {}
    for name in "pqr":
        kind = draw(st.sampled_from(KINDS))
        pointers = draw(st.lists(st.sampled_from(POINTERS), min_size=1, max_size=2))
        bindings = [
            {"version": version, "jsonPointer": pointer} for version, pointer in enumerate(pointers, 1)
        ]
        fields[name] = {"kind": kind, "bindings": bindings, "exact": True}
        if kind == "text":
            fields[name] |= {"analyzer": "unicode_word_v1", "positions": True}
        elif kind == "keyword" and draw(st.booleans()):
            fields[name] |= {"normalizer": "lowercase_v1", "prefix": True}
        elif kind != "bool":
            fields[name]["column"] = True
    return parse_search_config({"fields": fields})


trees: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "0", "", "a/b", "~", "é", "-"]), inner, max_size=3),
    ),
    max_leaves=12,
)
CLAUSES = [
    "has:{}",
    "{}:5",
    "{}:x",
    '{}:""',
    "{}:>0",
    "{}:<=5.5",
    "{}:true",
    "{}:2026-01-01",
    "{}:x*",
    '{}:"x"',
    "x",
]


@SOME
@given(configurations(), st.lists(trees, min_size=1, max_size=5), st.integers(1, 2))
def test_s2_any_configuration_decides_any_record(
    config: SearchConfig, batch: list[Any], version: int
) -> None:
    texts = [clause.format(name) for clause in CLAUSES for name in config.fields]
    for text, dialect in itertools.product(texts, (FILTER_DIALECT, SEARCH_DIALECT)):
        if _refusal(text, dialect, config) is not None:
            continue
        bound = bind_query(text, config, dialect)
        matcher = Matcher(bound, config, version)
        for record in batch:
            payload = payload_of(record)
            expected = evaluate_record(bound, decode_payload(payload), config, version)
            assert matcher.matches(payload) == expected
            assert matcher.matches_record(record) == expected


@pytest.mark.parametrize(
    "payload",
    [
        rb'{"\u0069d":"x"}',
        rb'{"id":"no","id":"x"}',
        rb'{ "id" : [ [ "y" ] , "\u0078" ] }',
        rb'{"id":"x","other":"\ud800","big":1e999}',
        rb'{"other":[1e999,"\udc00"],"id":"x"}',
        rb'{"id":["\ud800","x",1e999]}',
        b'{"id":"x","status":1' + b"0" * 5000 + b"}",
        b'{"deep":' + b"[" * 500 + b"]" * 500 + b',"id":"x"}',
        b'\n\t {"id":"x"}\r\n',
    ],
    ids=range(9),
)
def test_what_the_fast_decoder_does_not_take_is_decided_all_the_same(payload: bytes) -> None:
    bound = bind_query("id:x -status:5", CONFIG, FILTER_DIALECT)
    assert evaluate_record(bound, decode_payload(payload), CONFIG, VERSION)
    assert Matcher(bound, CONFIG, VERSION).matches(payload)
    without = payload.replace(b"x", b"y").replace(rb"\u0078", b"y")
    assert not Matcher(bound, CONFIG, VERSION).matches(without)
