from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.protocol.stream_names import NamePattern, literal_prefix
from tailrace.subscriptions import model
from tailrace.subscriptions.model import parse_config, parse_streams

LIMITS = Limits()
WEBHOOK: dict[str, Any] = {
    "type": "webhook",
    "pattern": "events/*",
    "webhook": {"url": "https://w.example/hook"},
}
PULL: dict[str, Any] = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake/pool"}


def parse(value: Any) -> model.SubscriptionConfig:
    return parse_config(json.dumps(value).encode(), LIMITS)


def test_defaults_are_filled_in() -> None:
    parsed = parse(WEBHOOK)
    assert parsed.lease_ttl_ms == 30_000
    assert parsed.streams == ()
    assert parsed.description is None
    assert parsed.wake_stream is None
    assert parsed.webhook_url == "https://w.example/hook"
    pull = parse(PULL)
    assert pull.wake_stream == "wake/pool"
    assert pull.webhook_url is None


def test_equal_configurations_hash_alike() -> None:
    base = parse({**WEBHOOK, "streams": ["b", "a"]})
    same = [
        {**WEBHOOK, "streams": ["a", "b", "a"]},
        {**WEBHOOK, "streams": ["a", "b"], "lease_ttl_ms": 30_000, "description": None},
        # What the type does not use does not count.
        {**WEBHOOK, "streams": ["a", "b"], "wake_stream": "wake/pool"},
    ]
    for value in same:
        assert parse(value).hash() == base.hash()
    other = [
        {**WEBHOOK, "streams": ["a"]},
        {**WEBHOOK, "streams": ["a", "b"], "pattern": "events/**"},
        {**WEBHOOK, "streams": ["a", "b"], "pattern": None},
        {**WEBHOOK, "streams": ["a", "b"], "lease_ttl_ms": 30_001},
        {**WEBHOOK, "streams": ["a", "b"], "description": "x"},
        {**WEBHOOK, "streams": ["a", "b"], "webhook": {"url": "https://w.example/hook2"}},
        {**PULL, "streams": ["a", "b"]},
    ]
    for value in other:
        assert parse(value).hash() != base.hash()


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "x",
        {"type": "mail", "pattern": "a"},
        {"type": "webhook", "webhook": {"url": "https://w.example"}},
        {"type": "webhook", "streams": [], "webhook": {"url": "https://w.example"}},
        {"type": "webhook", "pattern": "a"},
        {"type": "webhook", "pattern": "a", "webhook": {}},
        {"type": "webhook", "pattern": "a", "webhook": {"url": ""}},
        {"type": "webhook", "pattern": "a", "webhook": {"url": 7}},
        {"type": "webhook", "pattern": "a", "webhook": {"url": "https://w.example/" + "x" * 2048}},
        {"type": "pull-wake", "pattern": "a"},
        {**PULL, "wake_stream": ""},
        {**PULL, "wake_stream": "a//b"},
        {**PULL, "wake_stream": "__registry__"},
        {**PULL, "wake_stream": "hub/mbox/a"},
        {**WEBHOOK, "lease_ttl_ms": 999},
        {**WEBHOOK, "lease_ttl_ms": 600_001},
        {**WEBHOOK, "lease_ttl_ms": "1000"},
        {**WEBHOOK, "lease_ttl_ms": 1000.5},
        {**WEBHOOK, "pattern": ""},
        {**WEBHOOK, "pattern": "/a"},
        {**WEBHOOK, "pattern": "a//b"},
        {**WEBHOOK, "pattern": "a/../b"},
        {**WEBHOOK, "pattern": "a\n"},
        {**WEBHOOK, "pattern": 7},
        {**WEBHOOK, "streams": "a"},
        {**WEBHOOK, "streams": [""]},
        {**WEBHOOK, "streams": ["a/"]},
        {**WEBHOOK, "streams": [1]},
        {**WEBHOOK, "streams": ["x" * 1025]},
        {**WEBHOOK, "description": "x" * 5000},
        {**WEBHOOK, "unknown": True},
    ],
)
def test_what_is_not_a_subscription_is_refused(value: Any) -> None:
    with pytest.raises(TailraceError) as caught:
        parse(value)
    assert caught.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"streams":[]}', b'{"streams":null}', b"[]", b'{"streams":["a/"]}']
)
def test_what_is_not_a_list_of_streams_is_refused(body: bytes) -> None:
    with pytest.raises(TailraceError) as caught:
        parse_streams(body, LIMITS)
    assert caught.value.code == "INVALID_REQUEST"


def test_streams_are_sorted_and_unique() -> None:
    assert parse_streams(b'{"streams":["b","a/x","b"]}', LIMITS) == ("a/x", "b")


def test_ids() -> None:
    for good in ("s1", "a.b-c_d", "ü", "...", "x" * 256):
        assert model.check_id(good) == good
    for bad in ("", "a/b", ".", "..", "x" * 257, "a\x00", "a\n"):
        with pytest.raises(TailraceError):
            model.check_id(bad)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("events/*", ["events/a", "events/*"], ["events", "events/a/b", "event/a", "xevents/a"]),
        ("events/**", ["events", "events/a", "events/a/b"], ["eventsx", "events2/a", "x/events"]),
        ("**", ["a", "a/b/c"], ["__registry__", "hub/mbox/a"]),
        ("*", ["a", "hub"], ["a/b", "__registry__"]),
        ("**/done", ["done", "a/done", "a/b/done"], ["done/a", "a/doned"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z", "a/z/z"], ["a", "z", "a/z/b"]),
        ("a/*/c/**", ["a/b/c", "a/b/c/d/e"], ["a/c", "a/b/b/c"]),
        ("a*b/c", ["a*b/c"], ["axb/c", "ab/c"]),
        ("**x/y", ["**x/y"], ["a/x/y", "ax/y"]),
        ("a.c", ["a.c"], ["abc"]),
        ("__registry__", [], ["__registry__"]),
        ("hub/**", ["hub"], ["hub/x"]),
    ],
)
def test_globs(pattern: str, matching: list[str], other: list[str]) -> None:
    compiled = NamePattern(pattern)
    assert [name for name in matching if not compiled.matches(name)] == []
    assert [name for name in other if compiled.matches(name)] == []


segment = st.sampled_from(["a", "b", "c", "*", "**", "a*"])
glob = st.lists(segment, min_size=1, max_size=6).map("/".join)
name = st.lists(st.sampled_from(["a", "b", "c", "a*"]), min_size=1, max_size=6).map("/".join)


def oracle(pattern: str) -> re.Pattern[str]:
    """The same language as a regular expression over names with a slash after each segment."""
    parts = {"*": "[^/]+/", "**": "(?:[^/]+/)*"}
    return re.compile("".join(parts.get(part, re.escape(part) + "/") for part in pattern.split("/")))


@given(glob, name)
def test_globs_against_regular_expressions(pattern: str, candidate: str) -> None:
    expected = oracle(pattern).fullmatch(candidate + "/") is not None
    assert NamePattern(pattern).matches(candidate) == expected
    if expected:
        assert candidate.startswith(literal_prefix(pattern))


def test_many_stars_take_no_time() -> None:
    compiled = NamePattern("/".join(["**", "a"] * 100))
    assert not compiled.matches("/".join(["a"] * 500 + ["b"]))
    assert compiled.matches("/".join(["a"] * 500))


def test_literal_prefixes() -> None:
    assert literal_prefix("events/*") == "events/"
    assert literal_prefix("events/**") == "events"
    assert literal_prefix("a/b") == "a/b"
    assert literal_prefix("**") == literal_prefix("*/a") == ""
