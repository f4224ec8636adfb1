"""A client that names no capabilities: its connect is accepted, and its errors are typed."""

from __future__ import annotations

from typing import Any

import pytest

from support.hub_world import World
from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.hub import decide
from tailrace.hub.errors import HUB_CODES, HubError, error_payload, to_hub_error
from tailrace.hub.session import Session
from tailrace.hub.state import HubOptions

A, B = "@(t/a)", "@(t/b)"
VERSION = {"protocolVersion": "0.1.0"}


def connect(world: World, address: str = A, **metadata: Any) -> tuple[Session, dict[str, Any]]:
    session = world.open()
    return session, world.ask(session, "hub:connect", None, frm=address, metadata={**VERSION, **metadata})


def actor(world: World, address: str) -> Session:
    session, answer = connect(world, address)
    assert answer["type"] == "hub:connected", answer
    world.ask(session, "hub:register", {"actorAddress": address, "capabilities": ["x"]})
    return session


@pytest.mark.parametrize("metadata", [{}, {"capabilities": None}, {"capabilities": []}])
def test_connect_without_capabilities_is_accepted(metadata: dict[str, Any]) -> None:
    _, answer = connect(World(), **metadata)
    assert answer["type"] == "hub:connected"


@pytest.mark.parametrize("capabilities", ["ui", {"ui": True}, [1], ["x"] * 257])
def test_capabilities_that_are_not_a_short_list_of_words_are_refused(capabilities: Any) -> None:
    world = World()
    session, answer = connect(world, capabilities=capabilities)
    assert (answer["type"], answer["payload"]["code"]) == ("hub:error", "invalid_request")
    assert answer["payload"]["details"]["field"] == "capabilities"
    assert world.closes[session] == 1008


@pytest.mark.parametrize("words", [[], ["typed-errors"]])
def test_errors_are_typed_with_and_without_the_capability(words: list[str]) -> None:
    world = World(limits=Limits(hub_sends_per_s=1))
    session, answer = connect(world, capabilities=words)
    assert answer["type"] == "hub:connected"
    assert "typed-errors" in answer["payload"]["capabilities"]["features"], "old clients look for it"
    unknown = world.ask(session, "hub:send", {"to": B, "type": "t"})
    assert unknown["type"] == "hub:unknown_actor"
    assert unknown["payload"]["actorAddress"] == B
    world.ask(session, "hub:send", {"to": B, "type": "t"})
    limited = world.ask(session, "hub:send", {"to": B, "type": "t"})
    assert limited["type"] == "hub:rate_limited"
    assert limited["payload"]["retryAfter"] > 0
    world.run(decide.on_too_large(world.hub, session, b'{"id":"big"', 2_000_000, world.now))
    large = world.taken(session)[-1]
    assert (large["type"], large["correlationId"]) == ("hub:message_too_large", "big")
    assert (large["payload"]["messageSize"], large["payload"]["maxSize"]) == (2_000_000, 1_048_576)


def test_a_version_mismatch_is_typed() -> None:
    world = World()
    session, answer = connect(world, protocolVersion="2.0.0")
    payload = answer["payload"]
    assert answer["type"] == "hub:version_mismatch"
    assert (payload["clientVersion"], payload["serverVersion"]) == ("2.0.0", "0.1.0")
    assert payload["supportedVersions"] == ["0.1.0"]
    assert world.closes[session] == 1008


def test_unauthorized_is_typed_and_names_action_and_reason() -> None:
    def verify(_: str) -> Identity:
        raise TailraceError("unauthorized", "the token is not good")

    world = World(options=HubOptions(verify=verify))
    _, answer = connect(world, authToken="bearer x")
    assert answer["type"] == "hub:unauthorized"
    assert (answer["payload"]["action"], answer["payload"]["reason"]) == ("connect", "the token is not good")


def test_a_typed_error_has_the_members_of_the_generic_form_too() -> None:
    """Clients that read `details` of every error need no change."""
    for code, meaning in HUB_CODES.items():
        kind, payload = error_payload(HubError(code, "text", dict.fromkeys(meaning.members, 1)))
        assert kind == (meaning.typed or "hub:error")
        assert payload.keys() >= {"code", "message", "resolution", "details", "retryable"}
        assert list(payload)[: len(meaning.members)] == list(meaning.members), "its own members come first"


def test_refusals_of_lower_layers_have_all_members_of_their_typed_form() -> None:
    for code in ("payload_too_large", "forbidden", "unauthorized"):
        kind, payload = error_payload(to_hub_error(TailraceError(code, "no")))
        meaning = next(one for one in HUB_CODES.values() if one.typed == kind)
        assert payload.keys() >= set(meaning.members), code


# -- one connection for each identity ------------------------------------------------------------------------


def test_a_second_connect_of_the_same_address_closes_the_first_without_authentication() -> None:
    world = World()
    first = actor(world, A)
    world.taken(first)
    second, _ = connect(world, A)
    goodbye = world.taken(first)[-1]
    assert (goodbye["type"], goodbye["payload"]["reason"]) == ("hub:disconnect", "duplicate_connection")
    assert world.closes[first] == 1000
    assert second not in world.closes
    registered = world.ask(second, "hub:register", {"actorAddress": A, "capabilities": ["x"]})
    assert (registered["type"], registered["payload"]["version"]) == ("hub:registered", 2)


def test_an_address_that_was_only_named_at_connect_counts_too() -> None:
    world = World()
    first, _ = connect(world, A)
    connect(world, A)
    assert world.closes[first] == 1000


def test_the_address_registered_last_is_the_identity() -> None:
    """Without authentication it takes the place of the one that was named at connect."""
    world = World()
    first, _ = connect(world, A)
    world.ask(first, "hub:register", {"actorAddress": B, "capabilities": ["x"]})
    other, _ = connect(world, A)
    assert first not in world.closes
    connect(world, B)
    assert world.closes[first] == 1000
    assert other not in world.closes


def test_clients_that_name_no_address_do_not_close_each_other() -> None:
    world = World()
    sessions = [world.open() for _ in range(3)]
    for session in sessions:
        assert world.ask(session, "hub:connect", None, metadata=VERSION)["type"] == "hub:connected"
    assert not world.closes


def test_the_number_of_connections_of_an_identity_is_a_setting_without_authentication_too() -> None:
    world = World(limits=Limits(hub_connections_per_identity=2))
    sessions = [connect(world, A)[0] for _ in range(3)]
    assert list(world.closes) == sessions[:1]


def test_a_session_that_is_resumed_is_no_duplicate() -> None:
    world = World()
    first, answer = connect(world, A, capabilities=["resume"])
    world.lose(first)
    second, again = connect(world, A, capabilities=["resume"], resumeToken=answer["payload"]["resumeToken"])
    assert again["payload"]["resumed"] is True
    assert second not in world.closes
    connect(world, A)
    assert world.closes[second] == 1000


# -- how long a registration lasts ---------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [{"ttlSeconds": 0}, {"ttlSeconds": -5}, {"ttl": 0}, {"ttlSeconds": "60"}])
def test_a_ttl_that_is_not_positive_is_refused(payload: dict[str, Any]) -> None:
    world = World()
    session, _ = connect(world)
    answer = world.ask(session, "hub:register", {"actorAddress": A, "capabilities": ["x"], **payload})
    assert (answer["type"], answer["payload"]["code"]) == ("hub:error", "invalid_request")
    assert answer["payload"]["details"]["field"] == next(iter(payload))


@pytest.mark.parametrize(("asked", "given"), [(5, 60), (60, 60), (300, 300), (90_000, 3600)])
def test_a_ttl_out_of_bounds_is_moved_to_the_bound_and_the_answer_says_so(asked: int, given: int) -> None:
    world = World()
    session, _ = connect(world)
    payload = {"actorAddress": A, "capabilities": ["x"], "ttlSeconds": asked}
    registered = world.ask(session, "hub:register", payload)["payload"]
    assert registered["ttlSeconds"] == given
    assert registered["expiresAt"] == world.now + given * 1000
    renewed = world.ask(
        session, "hub:renew", {"renewalToken": registered["renewalToken"], "ttlSeconds": asked}
    )["payload"]
    assert renewed["ttlSeconds"] == given
