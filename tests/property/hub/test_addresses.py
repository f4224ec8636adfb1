"""Addresses, patterns, topics and filters against oracles that try everything."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.hub.addresses import (
    AddressPattern,
    TopicFilter,
    TopicTrie,
    durable_topic_error,
    is_own_path,
    mailbox_stream,
    parse_address,
    parse_topic,
)
from tailrace.hub.errors import HubError
from tailrace.protocol import stream_names

SEGMENT = string.ascii_letters + string.digits + "-_.:~"
segments = st.text(SEGMENT, min_size=1, max_size=6).filter(
    lambda text: text not in (".", "..", "pk", "touch") and not text.startswith("_")
)
paths = st.lists(segments, min_size=1, max_size=8).map("/".join)


@given(paths)
def test_an_address_is_a_path_that_can_be_part_of_a_streams_name(path: str) -> None:
    assert parse_address(f"@({path})") == path
    assert stream_names.is_valid_name(mailbox_stream(path), 1024)
    assert not stream_names.is_sub_resource_name(mailbox_stream(path))


@given(st.text("@()ab/._-~: *ä\n", max_size=12))
def test_other_text_is_no_address(text: str) -> None:
    inner = text[2:-1].split("/")
    proper = (
        text.startswith("@(")
        and text.endswith(")")
        and len(text) > 3
        and all(
            part and set(part) <= set(SEGMENT) and part not in (".", "..") and part[0] != "_"
            for part in inner
        )
        and len(inner) <= 8
    )
    if proper:
        assert parse_address(text, "to") == text[2:-1]
        return
    with pytest.raises(HubError) as refused:
        parse_address(text, "to")
    assert (refused.value.code, refused.value.details["field"]) == ("invalid_request", "to")


@pytest.mark.parametrize(
    "text", ["@(a/pk)", "@(touch)", "@(a//b)", "@(a/)", "@(/a)", "@()", "a/b", "@(a)\n", f"@({'a' * 254})"]
)
def test_addresses_that_could_not_be_reached_are_refused(text: str) -> None:
    with pytest.raises(HubError):
        parse_address(text)
    assert parse_address(f"@({'a' * 253})")
    with pytest.raises(HubError):
        parse_address("@(1/2/3/4/5/6/7/8/9)")


def test_an_actor_owns_itself_and_what_is_below() -> None:
    assert is_own_path("a/b", "a/b")
    assert is_own_path("a/b", "a/b/c")
    assert not is_own_path("a/b", "a/bc")
    assert not is_own_path("a/b", "a")
    assert not is_own_path("", "")


# -- patterns


def _covers(pattern: str, text: str) -> bool:
    """By definition: a star takes any number of characters."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(_covers(pattern[1:], text[cut:]) for cut in range(len(text) + 1))
    return text[:1] == pattern[0] and _covers(pattern[1:], text[1:])


@given(st.text("ab/*", max_size=9), st.text("ab/", min_size=1, max_size=10), st.booleans(), st.booleans())
def test_h4_patterns_match_as_the_oracle_does(pattern: str, path: str, wrap: bool, wrap_path: bool) -> None:
    pattern = pattern[:8]
    compiled = AddressPattern(f"@({pattern})" if wrap else pattern)
    assert compiled.matches(f"@({path})" if wrap_path else path) == _covers(pattern, path)
    if compiled.matches(path):
        assert path.startswith(compiled.prefix)
    if compiled.literal is not None:
        assert compiled.matches(compiled.literal)


def test_h4_the_worst_pattern_is_no_work() -> None:
    """Eight stars and no match: backtracking would take more steps than there are atoms."""
    assert not AddressPattern("*a" * 8 + "b").matches("a" * 253)
    assert AddressPattern("*a" * 8).matches("a" * 253)


@pytest.mark.parametrize("text", ["*" * 9, "a" * 257, "ä" * 129])
def test_patterns_are_bounded(text: str) -> None:
    with pytest.raises(HubError) as refused:
        AddressPattern(text)
    assert refused.value.details["field"] == "pattern"


# -- topics


def _wants(wanted: list[str], topic: list[str]) -> bool:
    """By definition, segment by segment."""
    if wanted == ["#"]:
        return True
    if not wanted or not topic:
        return not wanted and not topic
    return wanted[0] in ("+", topic[0]) and _wants(wanted[1:], topic[1:])


def _matching(wanted: str, topic: str) -> bool:
    segments, rest = wanted.split("/"), topic.split("/")
    # The rest may be nothing at all.
    return _wants(segments, rest) or (segments[-1] == "#" and _wants(segments[:-1], rest))


words = st.sampled_from(["a", "b", "", "a.b"])
topics = st.lists(words, min_size=1, max_size=5).map("/".join).filter(bool)
filters = st.tuples(st.lists(st.one_of(words, st.just("+")), max_size=5), st.sampled_from([[], ["#"]])).map(
    lambda parts: "/".join(parts[0] + parts[1])
)
proper_filters = filters.filter(bool)


@given(proper_filters, topics)
def test_h4_filters_match_as_the_oracle_does(wanted: str, topic: str) -> None:
    assert TopicFilter(wanted).matches(topic) == _matching(wanted, topic)


@given(
    st.lists(st.tuples(proper_filters, st.integers(0, 3)), max_size=30),
    st.lists(st.tuples(st.integers(0, 29), st.integers(0, 3)), max_size=20),
    st.lists(topics, min_size=1, max_size=5),
)
def test_h4_h31_the_trie_knows_exactly_what_was_added_and_not_removed(
    added: list[tuple[str, int]], removed: list[tuple[int, int]], published: list[str]
) -> None:
    trie: TopicTrie[int] = TopicTrie()
    held: set[tuple[str, int]] = set()
    for wanted, value in added:
        trie.add(TopicFilter(wanted), value)
        held.add((wanted, value))
    for place, value in removed:
        if place < len(added):
            wanted = added[place][0]
            assert trie.remove(TopicFilter(wanted), value) == ((wanted, value) in held)
            held.discard((wanted, value))
    assert len(trie) == len(held)
    for topic in published:
        assert sorted(trie.match(topic)) == sorted(
            value for wanted, value in held if _matching(wanted, topic)
        )
    for wanted, value in held:
        assert trie.remove(TopicFilter(wanted), value)
    assert (len(trie), trie._root.is_empty) == (0, True)


@pytest.mark.parametrize("text", ["", "a+", "+a", "#/a", "a#", "a/#/b", "a b", "ä", "a" * 257, "a/\n"])
def test_improper_filters_are_refused(text: str) -> None:
    with pytest.raises(HubError) as refused:
        TopicFilter(text)
    assert refused.value.details["field"] == "topic"


@given(st.text("ab/_-.:~+# ä", max_size=10))
def test_topics_are_what_can_be_published_to(text: str) -> None:
    proper = bool(text) and not set(text) & set("+# ä")
    if not proper:
        with pytest.raises(HubError) as refused:
            parse_topic(text)
        assert refused.value.code == "invalid_request"
        return
    assert parse_topic(text) == text
    assert TopicFilter(text).is_plain
    assert TopicFilter(text).matches(text)


def test_a_durable_topic_can_be_part_of_a_streams_name() -> None:
    assert durable_topic_error("orders/eu") is None
    for topic in ("a//b", "/a", "a/", "a/pk/b", "_a", ".."):
        assert durable_topic_error(topic)
        with pytest.raises(HubError):
            parse_topic(topic, durable=True)
        assert parse_topic(topic) == topic
