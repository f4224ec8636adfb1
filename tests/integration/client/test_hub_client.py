"""The Python client of the hub against a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.calls import eventually
from support.cutting_proxy import CuttingProxy
from support.hub_clients import QUICK, WAIT_S, OpenHub, fresh_address, next_of, open_hub
from support.server import ServerProcess
from tailrace.client import ClientError
from tailrace.client.hub import Hub, Message, Timeouts

__all__ = ["open_hub"]


@pytest.fixture
def pair(server: ServerProcess, open_hub: OpenHub) -> tuple[Any, Any]:
    """Two actors that are registered."""
    hubs = [open_hub(server.base_url) for _ in range(2)]
    for hub in hubs:
        hub.register()
    return hubs[0], hubs[1]


def _place(hub: Any) -> Any:
    """The inside of a client, to break its connection or to hurry it."""
    return (getattr(hub, "_target", None) or hub._hub)._resources


def _soon(hub: Any, work: Callable[[], Any]) -> None:
    loop = hub._loop if isinstance(hub, Hub) else hub._loop._loop
    loop.call_soon_threadsafe(work)


def test_a_message_arrives_with_its_verified_sender(pair: tuple[Any, Any]) -> None:
    one, other = pair
    sent = one.send(other.identity, "greeting", {"text": "hello"})
    message = next_of(other)
    assert (sent.status, sent.message_id) == ("sent", message.metadata["originalMessageId"])
    assert (message.type, message.sender, message.to) == ("greeting", one.identity, other.identity)
    assert message.data == {"text": "hello"}
    assert message.metadata["originalFrom"] == one.identity
    assert not message.wants_reply


def test_data_is_passed_on_byte_for_byte(pair: tuple[Any, Any]) -> None:
    one, other = pair
    text = b'{"big": 123456789012345678901234567890.50, "half": "\\ud800", "a":1, "a" : 2}'
    one.send(other.identity, "raw", text)
    assert next_of(other).raw == text


def test_acknowledgements_say_how_far_it_came(pair: tuple[Any, Any]) -> None:
    one, other = pair
    assert one.send(other.identity, "t", 1, ack="delivered").status == "delivered"
    accepted = one.send(other.identity, "t", 2, ack="accepted")
    assert (accepted.status, accepted.stream) == (
        "accepted",
        f"hub/mbox/{other.identity.removeprefix('@(').removesuffix(')')}",
    )
    assert [next_of(other).data, next_of(other).data] == [1, 2]


def test_a_producers_repeat_has_no_second_effect(pair: tuple[Any, Any]) -> None:
    one, other = pair
    first = one.send(other.identity, "t", 1, ack="accepted", producer=("p", 0, 0))
    again = one.send(other.identity, "t", 1, ack="accepted", producer=("p", 0, 0))
    assert (first.duplicate, again.duplicate) == (False, True)
    with pytest.raises(ClientError) as refused:
        one.send(other.identity, "t", 1, ack="accepted", producer=("p", 0, 5))
    assert refused.value.code == "producer_gap"


def test_whoever_is_not_there_is_told(pair: tuple[Any, Any]) -> None:
    one, _ = pair
    for call in (lambda: one.send("@(nobody)", "x", ack="delivered"), lambda: one.ask("@(nobody)", "x")):
        with pytest.raises(ClientError) as refused:
            call()
        assert refused.value.code == "unknown_actor"
        assert refused.value.extra["retryable"] is False
    with pytest.raises(ClientError) as wrong:
        one.send("nobody", "x", ack="delivered")
    assert (wrong.value.code, wrong.value.extra["field"]) == ("invalid_request", "to")


def test_questions_are_answered_in_parts_and_with_failures(pair: tuple[Any, Any]) -> None:
    asker, service = pair

    def serve() -> None:
        message: Message = next_of(service)
        assert message.wants_reply
        service.reply(message, {"part": 1}, final=False)
        service.reply(message, {"price": message.data["sku"] * 2})
        service.reply_error(next_of(service), "sold_out", "there is none left")

    server = threading.Thread(target=serve)
    server.start()
    parts: list[Any] = []
    assert asker.ask(service.identity, "quote", {"sku": 7}, on_part=parts.append) == {"price": 14}
    assert parts == [{"part": 1}]
    with pytest.raises(ClientError) as failed:
        asker.ask(service.identity, "quote", {"sku": 8})
    assert (failed.value.code, failed.value.extra["from"]) == ("sold_out", service.identity)
    server.join()


def test_a_question_that_nobody_answers_times_out(pair: tuple[Any, Any]) -> None:
    asker, service = pair
    with pytest.raises(ClientError) as late:
        asker.ask(service.identity, "quote", timeout_s=0.2)
    assert late.value.code == "timeout"
    assert late.value.outcome_unknown


def test_actors_are_found(server: ServerProcess, open_hub: OpenHub) -> None:
    kind = fresh_address("found").removeprefix("@(").removesuffix(")").replace("/", "-")
    hubs = [open_hub(server.base_url, address=f"@({kind}/{number})") for number in range(5)]
    for number, hub in enumerate(hubs):
        hub.register(capabilities=["render", f"n{number}"], metadata={"even": number % 2 == 0})
    found = list(hubs[0].discover(f"{kind}/*", page_size=2))
    assert [actor.address for actor in found] == [hub.identity for hub in hubs]
    assert found[1].capabilities == ["render", "n1"]
    even = hubs[0].discover(f"@({kind}/*)", metadata={"even": True})
    assert [actor.address for actor in even] == [hubs[place].identity for place in (0, 2, 4)]
    hubs[1].unregister(hubs[1].identity)
    assert list(hubs[0].discover("*", capabilities=["n1"])) == []


def test_topics(pair: tuple[Any, Any]) -> None:
    one, other = pair
    root = one.identity.removeprefix("@(").removesuffix(")")
    subscription = other.subscribe(f"{root}/+/created")
    published = one.publish(f"{root}/eu/created", "order", {"id": 1})
    assert (published.subscriber_count, published.stream) == (1, None)
    message = next_of(other)
    assert (message.topic, message.data, message.sender) == (f"{root}/eu/created", {"id": 1}, one.identity)
    other.unsubscribe(subscription)
    assert one.publish(f"{root}/eu/created", "order", {"id": 2}).subscriber_count == 0


def test_broadcasts_count_everybody_once(pair: tuple[Any, Any]) -> None:
    one, other = pair
    third = fresh_address("third")
    other.register(third, capabilities=["loud"])
    sent = one.broadcast("news", {"v": 2}, capability="loud")
    assert (sent.delivered_count, sent.queued_count, sent.failed_count, sent.total) == (1, 0, 0, 1)
    message = next_of(other)
    assert (message.type, message.to) == ("news", third)


def test_kept_messages_wait_and_are_committed(server: ServerProcess, open_hub: OpenHub) -> None:
    sender, address = open_hub(server.base_url), fresh_address("kept")
    owner = open_hub(server.base_url, address=address)
    owner.register(durable=True, commit="manual")
    owner.close()
    offsets = [sender.send(address, "task", number, ack="accepted").offset for number in range(3)]
    again = open_hub(server.base_url, address=address)
    received = []
    for message in again.follow():
        received.append((message.data, message.offset))
        if len(received) == 2:
            break
    assert received == list(zip(range(2), offsets, strict=False))
    # The second one was not finished: leaving the loop is not asking for the next.
    eventually(lambda: again.read_mailbox(address).committed == offsets[0], bool)
    page = again.read_mailbox(address)
    assert [kept.message["payload"] for kept in page.messages] == [1, 2]
    assert again.commit_offset(offsets[2], address=address).committed == offsets[2]
    assert again.read_mailbox(address).lag == 0


def test_a_lost_connection_comes_back_with_everything(pair: tuple[Any, Any]) -> None:
    one, other = pair
    topic = f"again/{other.identity.removeprefix('@(').removesuffix(')')}"
    other.subscribe(topic)
    before = other.session_id
    _soon(other, _place(other).session.drop)
    # A question is answered by the session that comes next.
    assert other.request("hub:queue_stats").type == "hub:queue_stats_response"
    assert _place(other).session.welcome.resumed
    assert one.send(other.identity, "after", 1, ack="delivered").status == "delivered"
    assert one.publish(topic, "t", 2).subscriber_count == 1
    assert [next_of(other).data, next_of(other).data] == [1, 2]
    assert other.session_id == before


def test_a_restart_of_the_server_is_survived(start_server: Any) -> None:
    server: ServerProcess = start_server()
    with (
        Hub(server.base_url, address=fresh_address(), retries=QUICK) as one,
        Hub(server.base_url, address=fresh_address(), retries=QUICK) as other,
    ):
        one.register()
        other.register()
        other.subscribe("restart")
        server.kill()
        server.start()
        # Each comes back when it does; the one that is sent to may be the later.
        eventually(
            lambda: [actor.online for actor in one.discover(other.identity)], lambda seen: seen == [True]
        )
        assert one.send(other.identity, "hello", 1, ack="delivered").status == "delivered"
        assert next_of(other).data == 1
        eventually(lambda: one.publish("restart", "t", 2).subscriber_count, lambda count: count == 1)


def test_the_later_of_two_with_one_address_wins(server: ServerProcess, open_hub: OpenHub) -> None:
    address = fresh_address("twice")
    first = open_hub(server.base_url, address=address)
    first.register()
    second = open_hub(server.base_url, address=address)
    second.register()
    with pytest.raises(ClientError) as ended:
        first.next_message(WAIT_S)
    assert ended.value.code == "duplicate_connection"
    with pytest.raises(ClientError):
        first.send(address, "x")
    third = open_hub(server.base_url)
    third.send(address, "x", 1)
    assert next_of(second).data == 1


def test_a_closed_client_and_a_server_that_is_not_there(server: ServerProcess, open_hub: OpenHub) -> None:
    hub = open_hub(server.base_url)
    hub.close()
    with pytest.raises(ClientError):
        hub.send("@(a)", "x")
    with pytest.raises(ClientError) as nowhere:
        open_hub("http://127.0.0.1:9")
    assert nowhere.value.code == "connect_failed"


def test_an_address_is_renewed_before_it_expires(server: ServerProcess, open_hub: OpenHub) -> None:
    hub = open_hub(server.base_url, timeouts=Timeouts(ask_s=WAIT_S))
    first = hub.register(ttl_s=60)
    place = _place(hub)
    # Half a minute is too long for a test: it is due now.
    place._held[hub.identity].renew_at = 0.0
    _soon(hub, place._held_changed.set)
    eventually(
        lambda: place._held[hub.identity].registration.renewal_token, lambda new: new != first.renewal_token
    )
    (actor,) = hub.discover(hub.identity)
    assert actor.expires_at >= first.expires_at


def test_a_durable_subscription_goes_on_where_it_was(server: ServerProcess, open_hub: OpenHub) -> None:
    publisher, address = open_hub(server.base_url), fresh_address("reader")
    topic = f"durable/{address.removeprefix('@(').removesuffix(')')}"

    def joined() -> Any:
        reader = open_hub(server.base_url, address=address)
        reader.register(durable=True, commit="manual")
        assert reader.subscribe(f"{topic}/#", durable=True, name="all").durable
        return reader

    first = joined()
    published = [publisher.publish(f"{topic}/a", "t", number) for number in range(2)]
    assert {one.stream for one in published} == {f"hub/topic/{topic}/a"}
    messages = [next_of(first) for _ in range(2)]
    assert [message.data for message in messages] == [0, 1]
    first.commit(messages[0])
    first.close()
    publisher.publish(f"{topic}/a", "t", 2)
    again = joined()
    missed = [next_of(again) for _ in range(2)]
    assert [(message.data, message.redelivered) for message in missed] == [(1, True), (2, False)]
    assert missed[1].offset > published[1].offset


def test_what_could_not_be_delivered_is_noticed(server: ServerProcess, open_hub: OpenHub) -> None:
    notices: list[Message] = []
    hub = open_hub(server.base_url, on_notice=notices.append)
    sent = hub.send("@(nobody)", "x")
    eventually(lambda: [notice.type for notice in notices], lambda seen: seen == ["hub:undeliverable"])
    assert notices[0].data["messageId"] == sent.message_id
    assert notices[0].data["reason"] == "unknown_actor"


def test_members_of_a_durable_group_commit_what_they_have_done(
    server: ServerProcess, open_hub: OpenHub
) -> None:
    topic = f"jobs/{fresh_address()[2:-1]}"
    hubs = [open_hub(server.base_url, capabilities=["mailbox"]) for _ in range(3)]
    publisher, workers = hubs[0], hubs[1:]
    for worker in workers:
        worker.register(durable=True, commit="manual")
        worker.subscribe(topic, durable=True, group="workers")
    for number in range(6):
        publisher.publish(topic, "job", number)
    taken = [[next_of(worker) for _ in range(3)] for worker in workers]
    assert sorted(message.data for messages in taken for message in messages) == list(range(6))
    workers[0].commit_each(taken[0][1:])
    workers[1].commit_each(taken[1])
    workers[0].close()
    moved = next_of(workers[1])
    assert (moved.data, moved.redelivered) == (taken[0][0].data, True)
    workers[1].commit(moved)
    publisher.publish(topic, "job", 6)
    assert next_of(workers[1]).data == 6


def test_presence_tells_who_is_there_and_who_comes_and_goes(server: ServerProcess, open_hub: OpenHub) -> None:
    room = fresh_address("room")[2:-1]
    watcher = open_hub(server.base_url)
    first = open_hub(server.base_url, address=f"@({room}/first)")
    first.register()
    events = iter(watcher.watch(f"@({room}/*)"))
    assert _told(next(events)) == ("joined", f"@({room}/first)")
    second = open_hub(server.base_url, address=f"@({room}/second)")
    second.register(capabilities=["dance"])
    assert next(events).capabilities == ["dance"]
    second.register(capabilities=["sing"])
    assert _told(next(events)) == ("updated", f"@({room}/second)")
    _soon(watcher, _place(watcher).session.drop)
    second.unregister(f"@({room}/second)")
    assert _told(next(events)) == ("left", f"@({room}/second)")
    _forget_session(watcher)
    second.register(f"@({room}/third)")
    assert _told(next(events)) == ("joined", f"@({room}/third)")


def test_presence_events_that_are_lost_with_their_connection_arrive_after_it_is_resumed(
    server: ServerProcess, open_hub: OpenHub
) -> None:
    room = fresh_address("room")[2:-1]
    with CuttingProxy(server.port) as proxy:
        watcher = open_hub(proxy.base_url)
        actor = open_hub(server.base_url, address=f"@({room}/actor)")
        service = open_hub(server.base_url, address=f"@({room}/service)")
        actor.register()
        service.register(durable=True)
        events = iter(watcher.watch(f"@({room}/*)"))
        assert sorted(_told(next(events)) for _ in range(2)) == [
            ("joined", f"@({room}/actor)"),
            ("joined", f"@({room}/service)"),
        ]
        service.close()  # its durable address stays registered
        assert _told(next(events)) == ("left", f"@({room}/service)")
        proxy.decide = lambda direction, piece: (
            not proxy.cuts and direction == "answer" and b'"event":"left"' in piece
        )
        actor.unregister(f"@({room}/actor)")
        assert _told(next(events)) == ("left", f"@({room}/actor)")
        assert (proxy.cuts, watcher.resumed) == (1, True)
        # A durable address without a session did not join because of the new snapshot.
        actor.register(f"@({room}/third)")
        assert _told(next(events)) == ("joined", f"@({room}/third)")


def _told(event: Any) -> tuple[str, str]:
    return event.event, event.actor_address


def _forget_session(hub: Any) -> None:
    """The next connection is a new session, not the old one resumed."""
    session = _place(hub).session

    def lose() -> None:
        session.welcome = None
        session.drop()

    _soon(hub, lose)
