# pyright: strict
"""The classes of questions: what is asked, and by what each event can be told to be an answer or not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from bench.evlog.events import FIRST, LAST, Event

Truth = Callable[[Event], bool]
Body = dict[str, object]

_words = re.compile(r"[^\W_]+").findall


@dataclass(frozen=True, slots=True)
class Search:
    """One search. `ranked` says that the order depends on how a server weighs words."""

    body: Body
    truth: Truth
    ranked: bool = False


@dataclass(frozen=True, slots=True)
class Aggregate:
    body: Body
    truth: Truth = field(default=lambda _event: True)


@dataclass(frozen=True, slots=True)
class QueryClass:
    """Questions of one kind; a measurement goes round them."""

    name: str
    goal_ms: float | None  # of the 50th percentile, at a million events
    questions: Sequence[Search | Aggregate]


def _same(name: str, value: object) -> Truth:
    return lambda event: event[name] == value


def _both(first: Truth, second: Truth) -> Truth:
    return lambda event: first(event) and second(event)


def _texts(event: Event) -> list[list[str]]:
    error = event.get("error")
    inner = cast("Event", error)["message"] if isinstance(error, dict) else None
    found = (event.get("message"), event.get("why"), event.get("fix"), inner)
    return [_words(text.lower()) for text in found if isinstance(text, str)]


def _says(*tokens: str) -> Truth:
    """The words follow one another in one of the texts."""
    wanted, length = list(tokens), len(tokens)

    def truth(event: Event) -> bool:
        return any(
            text[at : at + length] == wanted for text in _texts(event) for at in range(len(text) - length + 1)
        )

    return truth


def _at_least(name: str, bound: float) -> Truth:
    def truth(event: Event) -> bool:
        value = event[name]
        assert isinstance(value, int | float)
        return value >= bound

    return truth


def _searches(q: str, truth: Truth, *sort: str, ranked: bool = False) -> Search:
    body: Body = {"q": q, "size": 50}
    if sort:
        body["sort"] = list(sort)
    return Search(body, truth, ranked)


def search_classes(events: Sequence[Event]) -> list[QueryClass]:
    """`events` are some of those that were loaded, from all over the day."""
    return [*_by_identity(events), *_by_value(), *_by_word()]


def _by_identity(events: Sequence[Event]) -> list[QueryClass]:
    draw = random.Random(7)
    ids = [str(event["requestId"]) for event in draw.sample(list(events), 20)]
    traces = [str(event["traceId"]) for event in draw.sample(list(events), 10)]
    paths = [str(event["path"]) for event in draw.sample(list(events), 10)]
    begins = _searches("req:req_a*", lambda event: str(event["requestId"]).startswith("req_a"))
    return [
        QueryClass("exact id", 10, [_searches(f"req:{one}", _same("requestId", one)) for one in ids]),
        QueryClass("id that is not there", 10, [_searches("req:req_0", lambda _event: False)]),
        QueryClass("exact trace", 10, [_searches(f"trace:{one}", _same("traceId", one)) for one in traces]),
        QueryClass("prefix of an id", None, [begins]),
        QueryClass("exact path", None, [_searches(f'path:"{one}"', _same("path", one)) for one in paths]),
    ]


def _by_value() -> list[QueryClass]:
    pairs = [("checkout", "error"), ("catalog", "warn"), ("payments", "error"), ("auth", "debug")]
    newest = [
        _searches(f"service:{service} level:{level}", _both(_same("service", service), _same("level", level)))
        for service, level in pairs
    ]
    sorted_by = [
        _searches("service:checkout", _same("service", "checkout"), "duration:desc"),
        _searches("level:info", _same("level", "info"), "duration:asc"),
        _searches("method:get", _same("method", "GET"), "timestamp:asc"),
    ]
    slow = _both(_at_least("status", 500), _at_least("duration", 900))
    first, last = "2026-01-01T09:00:00.000Z", "2026-01-01T10:00:00.000Z"

    def in_hour(event: Event) -> bool:
        return first <= str(event["timestamp"]) < last

    carts = _both(_same("service", "cart"), in_hour)
    hour = f'timestamp:>="{first}" timestamp:<"{last}" service:cart'
    return [
        QueryClass("newest 50 by two equalities", 20, newest),
        QueryClass("sort by a column", 150, sorted_by),
        QueryClass("number range", None, [_searches("status:>=500 duration:>=900", slow)]),
        QueryClass("one hour of a service", None, [_searches(hour, carts)]),
    ]


def _by_word() -> list[QueryClass]:
    def words(*found: str) -> list[Search]:
        return [_searches(word, _says(word), ranked=True) for word in found]

    reset = _says("connection", "reset", "by", "peer")
    phrases = [
        _searches('"connection reset by peer"', reset, ranked=True),
        _searches('"cache miss"', _says("cache", "miss"), ranked=True),
    ]
    return [
        QueryClass("common word by score", 150, words("request", "completed", "cache")),
        QueryClass("rare word by score", 150, words("deadlock", "größe", "wishlist")),
        QueryClass("phrase", 150, phrases),
    ]


def aggregate_classes() -> list[QueryClass]:
    first, last = (time.isoformat(timespec="seconds")[:19] + "Z" for time in (FIRST, LAST))
    day: Body = {"rollup": "requests", "from": first, "to": last}
    by_service: Body = {**day, "group_by": ["service"]}
    return [
        QueryClass("24 h by 1 m and service", 50, [Aggregate({**by_service, "interval": "1m"})]),
        QueryClass("24 h by 1 h and service", 50, [Aggregate({**by_service, "interval": "1h"})]),
        QueryClass(
            "24 h by 5 m, one service",
            50,
            [Aggregate({**day, "interval": "5m", "q": "service:checkout"}, _same("service", "checkout"))],
        ),
        QueryClass(
            "24 h by 1 h, not by a dimension",
            None,
            [Aggregate({**by_service, "interval": "1h", "q": "duration:>=500"}, _at_least("duration", 500))],
        ),
        QueryClass(
            "90 s by 1 m",
            None,
            [
                Aggregate(
                    {**day, "interval": "1m", "from": "2026-01-01T12:00:30Z", "to": "2026-01-01T12:02:00Z"},
                    lambda event: (
                        "2026-01-01T12:00:30.000Z" <= str(event["timestamp"]) < "2026-01-01T12:02:00.000Z"
                    ),
                )
            ],
        ),
    ]
