"""Requests into terms of the protocol: what is remembered between requests is bounded in bytes."""

from __future__ import annotations

from tailrace.protocol import http_headers, query_params


def test_long_queries_are_not_remembered() -> None:
    query_params.parse_query(b"offset=-1&live=sse")
    before = query_params.parse_query_cached.cache_info().currsize
    for number in range(50):
        assert query_params.parse_query(b"key=%d&x=" % number + b"a" * 10_000)["key"] == str(number)
    assert query_params.parse_query_cached.cache_info().currsize == before


def test_long_content_types_are_not_remembered() -> None:
    before = http_headers.media_type.cache_info().currsize
    for number in range(50):
        assert not http_headers.is_valid_content_type(f"text/{number}" + "a" * 10_000)
    assert http_headers.media_type.cache_info().currsize == before
