"""What the `evlog` profile moves to `context` is searched by its path, wherever the entries are."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from support.builder import Builder
from support.calls import Caller, eventually
from support.offers import plan, planned, seal, uncovered
from support.server import ServerProcess
from support.wire import fresh

JSON = "application/json"
EVENTS: list[dict[str, Any]] = [
    {
        "service": "checkout" if number % 2 else "billing",
        "requestId": f"r{number}",
        "message": "the payment failed" if number % 5 == 0 else "fine",
        "user": f"u{number % 10}",
        "retries": number % 4,
        "late": number % 3 == 0,
        "context": {"cart": {"total": number / 2, "tags": ["a", f"t{number % 6}"]}},
    }
    for number in range(60)
]
# Each query, and what it has to find.
QUERIES: dict[str, Any] = {
    "context.user:u7": lambda event: event["user"] == "u7",
    "context.user:u*": lambda event: True,
    'context.user:"u7" service:checkout': lambda event: event["user"] == "u7",
    "service:billing context.user:u7": lambda event: False,
    "service:billing -context.user:u2": lambda event: event["service"] == "billing" and event["user"] != "u2",
    "-(context.user:u1 OR service:billing)": lambda event: (
        event["user"] != "u1" and event["service"] != "billing"
    ),
    "context.user:u1 OR requestId:r4": lambda event: event["user"] == "u1" or event["requestId"] == "r4",
    "context.retries:3": lambda event: event["retries"] == 3,
    "context.retries:>=2 context.late:true": lambda event: event["retries"] >= 2 and event["late"],
    "context.cart.total:<5": lambda event: event["context"]["cart"]["total"] < 5,
    "context.cart.tags:t4": lambda event: "t4" in event["context"]["cart"]["tags"],
    "failed context.user:u5": lambda event: "failed" in event["message"] and event["user"] == "u5",
    "context.nothing:x": lambda event: False,
}


def check(call: Caller, name: str, events: list[dict[str, Any]]) -> None:
    for query, matches in QUERIES.items():
        for sort in (["offset:asc"], ["_score", "offset"]):
            body = {"q": query, "size": 500, "sort": sort}
            answer = eventually(
                lambda body=body: call("POST", f"{name}/_search", body), lambda reply: reply.status != 408
            ).body
            assert answer["coverage"]["complete"], (query, answer)
            found = {hit["source"]["requestId"] for hit in answer["hits"]}
            assert found == {event["requestId"] for event in events if matches(event)}, query
            assert answer["total"] == {"value": len(found), "relation": "eq"}, query
        if "failed" in query or "*" in query:
            continue  # a filter knows neither bare words nor prefixes
        read = call("GET", f"{name}?offset=-1&filter={quote(query)}").body
        assert [row["requestId"] for row in read] == [
            event["requestId"] for event in events if matches(event)
        ], query


def events_stream(call: Caller, name: str) -> str:
    assert call("PUT", name, headers={"Content-Type": JSON}).status == 201
    assert call("POST", f"{name}/_profile", {"profile": {"kind": "evlog"}}).status == 200
    assert call("POST", name, EVENTS).status == 204
    return name


def test_fields_of_context_are_searched(server: ServerProcess) -> None:
    call = Caller(server)
    name = events_stream(call, fresh("events"))
    check(call, name, EVENTS)
    assert call("POST", name, [{**EVENTS[7], "requestId": "new"}]).status == 204
    check(call, name, [*EVENTS, {**EVENTS[7], "requestId": "new"}])
    hit = call("POST", f"{name}/_search", {"q": "context.user:u7", "size": 1}).body["hits"][0]
    assert hit["fields"]["context.user"] == "u7"


def test_fields_of_context_are_searched_in_sealed_entries_and_through_companions(
    server: ServerProcess,
) -> None:
    call = Caller(server)
    name = events_stream(call, fresh("sealed"))
    seal(call, name)
    check(call, name, EVENTS)
    planned(call, name, 1)
    Builder(call, server.data_dir).publish_all(name)
    eventually(lambda: plan(call, name), lambda shown: not uncovered(shown))
    check(call, name, EVENTS)
    more = {**EVENTS[7], "requestId": "new"}
    assert call("POST", name, [more]).status == 204
    check(call, name, [*EVENTS, more])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("user:u7", "unknown search field user"),
        ("contextual.user:u7", "unknown search field contextual.user"),
        ("has:context.user", "unknown search field context.user"),
        ("context.a:1 OR context.a:x", "search field context.a is compared with values of two kinds"),
    ],
)
def test_what_is_refused(server: ServerProcess, query: str, message: str) -> None:
    call = Caller(server)
    name = events_stream(call, fresh("refused"))
    refused = call("POST", f"{name}/_search", {"q": query})
    assert (refused.status, refused.body["error"]["message"].startswith(message)) == (400, True), refused.body


def test_other_streams_have_no_undeclared_fields(server: ServerProcess) -> None:
    call = Caller(server)
    name = fresh("plain")
    assert call("PUT", name, headers={"Content-Type": JSON}).status == 201
    field = {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/id"}], "exact": True}
    assert call("POST", f"{name}/_schema", {"schema": {}, "search": {"fields": {"id": field}}}).status == 200
    refused = call("POST", f"{name}/_search", {"q": "context.user:u7"})
    assert refused.body["error"]["message"] == "unknown search field context.user"
