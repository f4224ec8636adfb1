"""Wake streams with a schema or a profile: the server's own events keep to them."""

from __future__ import annotations

import json

import pytest

from support.calls import eventually
from support.wire import Wire, fresh

JSON = "application/json"
FITTING = {"type": "object", "required": ["subscription_id"]}
UNFIT = {"type": "object", "required": ["nothing like it"]}


def subscribed(http: Wire, schema: object) -> tuple[str, str, str]:
    """The name of a subscription, of its wake stream with this schema, and of the stream it is about."""
    identifier, wakes, work = fresh("sub").replace("/", "-"), fresh("wakes"), fresh("work")
    for name in (wakes, work):
        assert http.put(name, JSON).status == 201
    routing = {"jsonPointer": "/subscription_id", "required": False}
    update = {"schema": schema, "routingKey": routing}
    assert http.post(f"{wakes}/_schema", JSON, json.dumps(update)).status == 200
    body = {"type": "pull-wake", "streams": [work], "wake_stream": wakes, "lease_ttl_ms": 30_000}
    assert http.put(f"/v1/stream/__ds/subscriptions/{identifier}", JSON, json.dumps(body)).status == 201
    assert http.post(work, JSON, "[1]").status == 204
    return identifier, wakes, work


def test_events_that_fit_are_written_with_their_key(http: Wire) -> None:
    identifier, wakes, _ = subscribed(http, FITTING)
    (event,) = eventually(lambda: http.get(f"{wakes}?offset=-1").json, bool)
    assert event["subscription_id"] == identifier
    assert http.get(f"{wakes}?offset=-1&key={identifier}").json == [event]


@pytest.mark.parametrize("schema", [UNFIT, False])
def test_an_event_that_does_not_fit_is_not_written_and_the_work_can_be_claimed(
    http: Wire, schema: object
) -> None:
    identifier, wakes, work = subscribed(http, schema)
    path = f"/v1/stream/__ds/subscriptions/{identifier}/claim"
    claimed = eventually(
        lambda: http.post(path, JSON, json.dumps({"worker": "w"})), lambda answer: answer.status == 200
    )
    assert work in json.dumps(claimed.json)
    assert http.get(f"{wakes}?offset=-1").json == []
