"""The query language: tokens, trees, clauses, and the words of every refusal."""

from __future__ import annotations

import pytest

from tailrace.common.errors import TailraceError
from tailrace.schema.search_config import SearchConfig, parse_search_config
from tailrace.search.query_language import (
    FILTER_DIALECT,
    SEARCH_DIALECT,
    All,
    And,
    AnyOf,
    Anywhere,
    BareTerm,
    BoundQuery,
    Compares,
    Dialect,
    Equals,
    FieldComparison,
    HasField,
    HasValue,
    LiteralValue,
    Negation,
    Not,
    Or,
    Phrase,
    QueryNode,
    StartsWith,
    Words,
    bind_query,
    check_rollup_includes,
    parse_query_text,
    tokenize,
)

BIND = [{"version": 1, "jsonPointer": "/v"}]
TEXT = {"kind": "text", "analyzer": "unicode_word_v1", "bindings": BIND}
CONFIG = parse_search_config(
    {
        "fields": {
            "service": {
                "kind": "keyword",
                "normalizer": "lowercase_v1",
                "bindings": BIND,
                "exact": True,
                "prefix": True,
            },
            "id": {"kind": "keyword", "bindings": BIND, "exact": True},
            "path": {"kind": "keyword", "bindings": BIND, "column": True},
            "lead": {"kind": "keyword", "bindings": BIND, "prefix": True},
            "quiet": {"kind": "keyword", "bindings": BIND},
            "status": {"kind": "integer", "bindings": BIND, "column": True},
            "count": {"kind": "integer", "bindings": BIND, "exact": True},
            "ratio": {"kind": "float", "bindings": BIND, "column": True},
            "at": {"kind": "date", "bindings": BIND, "column": True},
            "ok": {"kind": "bool", "bindings": BIND, "column": True},
            "seen": {"kind": "bool", "bindings": BIND, "exists": True},
            "message": {**TEXT, "positions": True},
            "note": {**TEXT, "exists": True},
        },
        "aliases": {"svc": "service", "msg": "message"},
        "defaultFields": [{"field": "message", "boost": 2}, "note", "service"],
    }
)


def _config(**search: object) -> SearchConfig:
    return parse_search_config(
        {"fields": {"id": {"kind": "keyword", "bindings": BIND, "exact": True}}, **search}
    )


def _is(name: str, text: str, quoted: bool = False) -> FieldComparison:
    return FieldComparison(name, None, LiteralValue(text, quoted))


A, B, C = _is("a", "1"), _is("b", "2"), _is("c", "3")


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('a:b("c")-d', "word : word ( quoted ) - word"),
        ("x:>=-5 y:-.5 z: -5", "word : op word word : word word : - word"),
        ("a-b*c/d.e\"f'", "word"),
        ("x:>5", "word : op word"),
        ("x>5 =", "word stray word stray"),
        ("x: >5", "word : stray word"),
        ("x:-y", "word : - word"),
        ("x:==5", "word : op stray word"),
        ("\u2003a\n\tb", "word word"),
    ],
)
def test_texts_become_tokens(text: str, kinds: str) -> None:
    assert " ".join(token.kind for token in tokenize(text, SEARCH_DIALECT)) == kinds


def test_quoted_strings_keep_what_is_escaped() -> None:
    (token,) = tokenize(r'"a\"b\\c\nd\te\xf\:"', FILTER_DIALECT)
    assert token.text == 'a"b\\c\nd\texf:'


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a:1", A),
        ("a:1 b:2 OR c:3", Or((And((A, B)), C))),
        ("a:1 or b:2 And c:3", Or((A, And((B, C))))),
        ("a:1 (b:2 OR c:3)", And((A, Or((B, C))))),
        ("-a:1 b:2", And((Not(A), B))),
        ("NOT NOT -a:1", Not(Not(Not(A)))),
        ("not (a:1 OR -b:2)", Not(Or((A, Not(B))))),
        ("-( -a:1 b:2 )", Not(And((Not(A), B)))),
        ("(((a:1)))", A),
        ("has:a HAS:b", And((HasField("a"), HasField("b")))),
        ("a:=1", FieldComparison("a", "=", LiteralValue("1", False))),
        ("a:<=-1.5", FieldComparison("a", "<=", LiteralValue("-1.5", False))),
        ('a:>"2026-01-01T00:00:00Z"', FieldComparison("a", ">", LiteralValue("2026-01-01T00:00:00Z", True))),
        ('a:"x y"b:2', And((_is("a", "x y", True), B))),
        ("a:or OR b:2", Or((_is("a", "or"), B))),
        ('a:"" b:2', And((_is("a", "", True), B))),
        ("a:b-c", _is("a", "b-c")),
    ],
)
def test_trees_follow_the_grammar_in_both_uses(text: str, tree: QueryNode) -> None:
    assert parse_query_text(text, FILTER_DIALECT) == parse_query_text(text, SEARCH_DIALECT) == tree


def test_words_and_phrases_stand_alone_in_searches_only() -> None:
    assert parse_query_text('word pre* "a b" -"AND"', SEARCH_DIALECT) == And(
        (
            BareTerm(LiteralValue("word", False)),
            BareTerm(LiteralValue("pre*", False)),
            BareTerm(LiteralValue("a b", True)),
            Not(BareTerm(LiteralValue("AND", True))),
        )
    )


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("svc:CheckOut", Equals("service", "checkout")),
        ("id:CheckOut*", Equals("id", "CheckOut*")),
        ("path:=/a", Equals("path", "/a")),
        ('id:""', Equals("id", "")),
        ("status:500", Equals("status", 500)),
        ("count:=-3", Equals("count", -3)),
        ("status:>=500", Compares("status", ">=", 500)),
        ("ratio:<.5", Compares("ratio", "<", 0.5)),
        ("at:2026-01-01", Equals("at", 1767225600000)),
        ('at:>"2026-01-01T00:00:00.001Z"', Compares("at", ">", 1767225600001)),
        ("at:<=-1", Compares("at", "<=", -1)),
        ("ok:TRUE", Equals("ok", True)),
        ("has:svc", HasValue("service")),
        ("has:note", HasValue("note")),
        ("has:seen", HasValue("seen")),
        (
            "-(ok:true OR has:id) status:1",
            All((Negation(AnyOf((Equals("ok", True), HasValue("id")))), Equals("status", 1))),
        ),
    ],
)
def test_filters_are_bound_to_fields(text: str, bound: BoundQuery) -> None:
    assert bind_query(text, CONFIG, FILTER_DIALECT) == bound


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("svc:Check*", StartsWith("service", "check")),
        ('svc:"Check*"', Equals("service", "check*")),
        ("lead:*", StartsWith("lead", "")),
        ("status:500", Equals("status", 500)),
        ("msg:Foo-Bar", Words("message", ("foo", "bar"), False)),
        ("note:Foo-Ba*", Words("note", ("foo", "ba"), True)),
        ('message:"Foo bar"', Phrase("message", ("foo", "bar"))),
        (
            "Foo",
            Anywhere(
                (
                    Words("message", ("foo",), False),
                    Words("note", ("foo",), False),
                    Equals("service", "foo"),
                )
            ),
        ),
        (
            "Foo*",
            Anywhere(
                (
                    Words("message", ("foo",), True),
                    Words("note", ("foo",), True),
                    StartsWith("service", "foo"),
                )
            ),
        ),
        ('"A b"', Anywhere((Phrase("message", ("a", "b")), Equals("service", "a b")))),
        ("!?", Anywhere((Equals("service", "!?"),))),
    ],
)
def test_searches_are_bound_to_fields(text: str, bound: BoundQuery) -> None:
    assert bind_query(text, CONFIG, SEARCH_DIALECT) == bound


def test_bare_words_look_in_all_text_fields_when_no_default_is_set() -> None:
    config = _config(
        fields={"a": TEXT, "b": {"kind": "bool", "bindings": BIND}, "c": {**TEXT, "positions": True}}
    )
    words = (Words("a", ("x",), False), Words("c", ("x",), False))
    assert bind_query("x", config, SEARCH_DIALECT) == Anywhere(words)
    assert bind_query('"x"', config, SEARCH_DIALECT) == Anywhere((Phrase("c", ("x",)),))


LONG = "id:" + "x" * 16381
MANY = " ".join(["id:1"] * 1024)


def _nested(levels: int) -> str:
    return "(" * levels + "id:1" + ")" * levels


def test_texts_up_to_the_limits_are_accepted() -> None:
    for text in (LONG, MANY, _nested(64), "-" * 64 + "id:1", "id:" + "é" * 8190):
        bind_query(text, CONFIG, FILTER_DIALECT)
        bind_query(text, CONFIG, SEARCH_DIALECT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "filter must not be empty"),
        (" \t\n", "filter must not be empty"),
        (LONG + "x", "filter must not be longer than 16384 bytes"),
        ("id:" + "é" * 8191, "filter must not be longer than 16384 bytes"),
        (MANY + " id:2", "filter has more than 1024 clauses"),
        (" OR ".join(["id:1"] * 2000), "filter has more than 1024 clauses"),
        (_nested(65), "filter is nested deeper than 64 levels"),
        ("-" * 65 + "id:1", "filter is nested deeper than 64 levels"),
        ("(id:1", "missing ')' in filter"),
        ("(id:1 OR (ok:true)", "missing ')' in filter"),
        ("(id:1 : )", "missing ')' in filter"),
        ('id:"abc', "unterminated quoted string in filter"),
        ('id:"abc\\"', "unterminated quoted string in filter"),
        ("id:", "expected value in filter clause"),
        ("id:>", "expected value in filter clause"),
        ("id: AND ok:true", "expected value in filter clause"),
        ("id:(x)", "expected value in filter clause"),
        ("id:-x", "expected value in filter clause"),
        ("id:>=-x", "expected value in filter clause"),
        ("status: >5", "expected value in filter clause"),
        ("id::x", "expected value in filter clause"),
        ("has:", "has: requires a field name"),
        ('has:"id"', "has: requires a field name"),
        ("()", "expected clause in filter"),
        ("AND id:1", "expected clause in filter"),
        ("id:1 OR", "expected clause in filter"),
        ("id:1 AND", "expected clause in filter"),
        ("NOT", "expected clause in filter"),
        (":x", "expected clause in filter"),
        ("id:1 )", "unexpected ')' in filter"),
        ("id:1 >5", "unexpected '>' in filter"),
        ("at:>2026-01-01T00:00:00Z", "unexpected ':' in filter (a value that contains ':' must be quoted)"),
        ("word", "expected ':' in filter clause"),
        ('"a phrase"', "expected field name in filter"),
        ("nothing:x", "filter field nothing is not indexed"),
        ("has:nothing", "filter field nothing is not indexed"),
        ("contains:x", "filter field contains is not indexed"),
        ("quiet:x", "filter field quiet does not support equality filters"),
        ("seen:true", "filter field seen does not support equality filters"),
        ("count:>5", "filter field count does not support comparisons"),
        ("id:>5", "filter field id does not support comparisons"),
        ("has:quiet", "filter field quiet does not support has:"),
        ("has:msg", "filter field msg does not support has:"),
        ("path:>a", "comparison operator not supported for filter field"),
        ("ok:<true", "comparison operator not supported for filter field"),
        ("status:5.5", "invalid value for filter field"),
        ("status:>five", "invalid value for filter field"),
        ("status:9223372036854775808", "invalid value for filter field"),
        ("ratio:inf", "invalid value for filter field"),
        ("at:2026-02-30", "invalid value for filter field"),
        ("ok:yes", "invalid value for filter field"),
        ("message:word", "invalid value for filter field"),
        ("note:>word", "invalid value for filter field"),
    ],
)
def test_a_filter_that_breaks_a_rule_is_refused(text: str, message: str) -> None:
    assert _refusal(text, CONFIG, FILTER_DIALECT) == ("invalid_filter", message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "q must not be empty"),
        (LONG + "x", "q must not be longer than 16384 bytes"),
        (MANY + " x", "search query has more than 1024 clauses"),
        (_nested(65), "search query is nested deeper than 64 levels"),
        ("(x", "missing ')' in search query"),
        ('"abc', "unterminated quoted string in search query"),
        ("id:", "expected value in fielded search clause"),
        ("id:>=", "expected value in fielded search clause"),
        ("x OR", "expected clause in search query"),
        ("x)", "unexpected ')' in search query"),
        ("contains:x", "contains: is not supported on _search yet"),
        ("Contains:x", "contains: is not supported on _search yet"),
        ("nothing:x", "unknown search field nothing"),
        ("has:nothing", "unknown search field nothing"),
        ("quiet:x", "search field quiet does not support exact queries"),
        ("lead:x", "search field lead does not support exact queries"),
        ("seen:true", "search field seen does not support exact queries"),
        ("message:=x", "search field message does not support exact queries"),
        ("id:x*", "search field id does not support prefix queries"),
        ("count:>5", "search field count does not support comparisons"),
        ("path:>5", "search field path does not support comparisons"),
        ("ok:>true", "search field ok does not support comparisons"),
        ("message:>x", "search field message does not support comparisons"),
        ("has:quiet", "search field quiet does not support has:"),
        ('note:"a b"', "search field note does not support phrase queries"),
        ("status:5*", "invalid value for search field"),
        ("at:>never", "invalid value for search field"),
        ("message:?!", "search text clause did not produce any searchable tokens"),
        ('message:"..."', "search text clause did not produce any searchable tokens"),
        ("note:*", "search text clause did not produce any searchable tokens"),
    ],
)
def test_a_search_that_breaks_a_rule_is_refused(text: str, message: str) -> None:
    assert _refusal(text, CONFIG, SEARCH_DIALECT) == ("invalid_request", message)


def test_bare_words_need_a_field_to_look_in() -> None:
    needs = "search.defaultFields must include at least one text or keyword field"
    assert _refusal("x", _config(), SEARCH_DIALECT) == ("invalid_request", needs)
    config = _config(fields={"note": TEXT})
    assert _refusal('"a b"', config, SEARCH_DIALECT)[1] == "field does not support phrase queries"
    assert (
        _refusal("?", config, SEARCH_DIALECT)[1] == "search text clause did not produce any searchable tokens"
    )


@pytest.mark.parametrize("dialect", [FILTER_DIALECT, SEARCH_DIALECT], ids=["filter", "search"])
def test_without_a_search_configuration_nothing_can_be_asked(dialect: Dialect) -> None:
    with pytest.raises(TailraceError) as refusal:
        bind_query("id:1", None, dialect)
    assert (refusal.value.code, refusal.value.message) == (
        dialect.code,
        "search is not configured for this stream",
    )


def _refusal(text: str, config: SearchConfig, dialect: Dialect) -> tuple[str, str]:
    with pytest.raises(TailraceError) as refusal:
        bind_query(text, config, dialect)
    return refusal.value.code, refusal.value.message


def test_includes_are_checked_against_their_own_fields() -> None:
    at = {"kind": "date", "bindings": BIND}
    for include, inner, message in [
        ("at:", None, "search.rollups.r.include: expected value in fielded search clause"),
        (None, "none:1", "search.rollups.r.measures.n.include: unknown search field none"),
        (None, "has:at", "search.rollups.r.measures.n.include: search field at does not support has:"),
    ]:
        rollup: dict[str, object] = {"timestampField": "at", "intervals": ["1m"]}
        rollup["measures"] = {"n": {"kind": "count"} | ({"include": inner} if inner else {})}
        if include:
            rollup["include"] = include
        config = parse_search_config({"fields": {"at": at}, "rollups": {"r": rollup}})
        with pytest.raises(TailraceError) as refusal:
            check_rollup_includes(config)
        assert (refusal.value.code, refusal.value.message) == ("invalid_request", message)
    good = {"timestampField": "at", "intervals": ["1m"], "include": "at:2026-01-01"}
    good["measures"] = {"n": {"kind": "count", "include": "-has:at"}}
    check_rollup_includes(
        parse_search_config({"fields": {"at": {**at, "exact": True}}, "rollups": {"r": good}})
    )


def test_clauses_of_two_kinds_are_never_taken_for_one_another() -> None:
    """They are keys of what was worked out about them."""
    assert len({Equals("id", "x"), StartsWith("id", "x")}) == 2
    assert len({All(()), AnyOf(()), Anywhere(())}) == 3
