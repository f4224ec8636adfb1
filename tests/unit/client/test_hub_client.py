"""The client of the hub without a hub, and with one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from tailrace.client import ClientError, Retries
from tailrace.client.hub import AsyncHub, Message, SigningKey, Timeouts, from_runtime, to_runtime
from tailrace.client.hub.model import Registration
from tailrace.client.hub.resources import HeldRegistration, Inbox, PausedTargets
from tailrace.client.hub.wire import OutgoingRequest, error_from_message, socket_url
from tailrace.hub.envelope import HUB_ADDRESS, encode_envelope, parse_envelope
from tailrace.hub.errors import HubError
from tailrace.hub.signatures import SignatureKey, verify_signature

QUICK = Retries(delay_s_first=0.01, delay_s_max=0.05, attempts_max=2)
NOW_MS = 1_767_225_600_000
WAIT_S = 30.0


def message(kind: str, payload: Any, **members: Any) -> Message:
    text = json.dumps(payload).encode()
    members = {"id": "1", "from_": HUB_ADDRESS, "to": "@(a)", "timestamp": NOW_MS, **members}
    return Message(parse_envelope(encode_envelope(type=kind, payload=text, **members)))


def test_addresses_of_other_runtimes() -> None:
    assert to_runtime("@(w-1)", "browser") == "local://w-1"
    assert from_runtime("local://w-1", "browser") == "@(w-1)"
    for text in ("remote://do/p/q", "remote://worker/p/q", "worker://p/q", "do://p/q", "@(p/q)"):
        assert from_runtime(text, "cloudflare") == "@(p/q)"
    assert to_runtime("@(p/q)", "cloudflare") == "remote://do/p/q"
    assert (to_runtime("@(p/q)", "beam"), from_runtime("p/q", "beam")) == ("p/q", "@(p/q)")
    assert to_runtime("@(p/q)", "local") == to_runtime("@(p/q)", "seag") == "@(p/q)"
    for text in ("p q", "http://p", "@(p"):
        with pytest.raises(HubError):
            from_runtime(text, "local")


def test_where_the_hub_is() -> None:
    assert socket_url("http://a:1/") == "ws://a:1/hub/ws"
    assert socket_url("https://a") == "wss://a/hub/ws"
    assert socket_url("wss://a/ws") == "wss://a/ws"
    with pytest.raises(ValueError, match="base_url"):
        socket_url("a:1")


def test_errors_in_both_forms() -> None:
    details = {"retryAfter": 120, "outcome": "not_applied"}
    payload = {"code": "rate_limited", "message": "slowly", "details": details, "retryable": True}
    for given in (
        message("hub:error", payload),
        message("hub:rate_limited", {"retryAfter": 120, "code": "rate_limited", "message": "slowly"}),
    ):
        error = error_from_message(given)
        assert error is not None
        assert (error.code, error.message, error.extra["retryAfter"]) == ("rate_limited", "slowly", 120)
        assert not error.outcome_unknown
    unknown = error_from_message(message("hub:error", {"code": "timeout", "details": {"outcome": "unknown"}}))
    assert unknown is not None
    assert unknown.outcome_unknown
    assert error_from_message(message("hub:published", {})) is None


@pytest.mark.parametrize("key_id", [None, "k1"])
def test_h13_what_is_sent_is_signed(key_id: str | None) -> None:
    key = SigningKey(bytes(32), key_id)
    request = OutgoingRequest(id="1", type="hub:send", payload={"to": "@(b)", "data": 1.5})
    frame = request.frame("@(a)", NOW_MS, key)
    signature = parse_envelope(frame).signature
    assert signature is not None
    verify_signature(frame, signature, [SignatureKey("k1", key.secret, NOW_MS)], NOW_MS)
    assert "00" not in repr(key)


def test_the_inbox_makes_whoever_fills_it_wait() -> None:
    async def play() -> None:
        inbox = Inbox(messages_max=2, bytes_max=10_000)
        for number in range(2):
            await inbox.put(message("t", number))
        third = asyncio.ensure_future(inbox.put(message("t", 2)))
        await asyncio.sleep(0)
        assert inbox.full
        assert not third.done()
        taken = [await inbox.get() for _ in range(3)]
        assert [one.data for one in taken if one is not None] == [0, 1, 2]
        await third
        inbox.end(None)
        assert await inbox.get() is None
        inbox.end(ClientError("x", "y"))
        with pytest.raises(ClientError):
            await inbox.get()

    asyncio.run(play())


def test_pauses() -> None:
    paused = PausedTargets()
    paused.pause(["@(a)"])
    assert "@(a)" in paused
    assert "@(b)" not in paused
    paused.pause(None)
    assert "@(b)" in paused
    paused.resume(["@(a)"])
    assert "@(a)" in paused
    paused.resume(None)
    assert "@(a)" not in paused


# -- hubs that misbehave

Script = Callable[[ServerConnection, dict[str, Any]], Awaitable[None]]


def answer(request: dict[str, Any], kind: str, payload: Any, **metadata: Any) -> str:
    text = encode_envelope(
        id="a",
        from_=HUB_ADDRESS,
        to=request["from"],
        type=kind,
        payload=json.dumps(payload).encode(),
        timestamp=NOW_MS,
        correlation_id=request["id"],
        metadata=json.dumps(metadata).encode(),
    )
    return text.decode()


def welcome(request: dict[str, Any], **changed: Any) -> str:
    payload = {"sessionId": "s", "heartbeatInterval": 20, "resumeToken": None, "resumed": False, **changed}
    return answer(request, "hub:connected", payload, actorIdentity="@(verified)")


def played(script: Script, client: Callable[[AsyncHub], Awaitable[None]], **options: Any) -> list[str]:
    """Runs a client against a scripted hub. Gives the types of all requests."""
    seen: list[str] = []

    async def handle(socket: ServerConnection) -> None:
        async for text in socket:
            request = json.loads(text)
            seen.append(request["type"])
            await script(socket, request)

    async def run() -> None:
        async with serve(handle, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            hub = AsyncHub(f"http://127.0.0.1:{port}", retries=QUICK, **options)
            try:
                async with asyncio.timeout(WAIT_S):
                    await client(hub)
            finally:
                await hub.close()

    asyncio.run(run())
    return seen


def test_a_silent_hub_is_no_hub() -> None:
    async def client(hub: AsyncHub) -> None:
        with pytest.raises(ClientError) as failed:
            await hub.connect()
        assert failed.value.code == "connect_failed"

    async def silent(_socket: ServerConnection, _request: dict[str, Any]) -> None:
        return

    assert played(silent, client, timeouts=Timeouts(connect_s=1.0)) == ["hub:connect"] * 2


@pytest.mark.parametrize("code", ["unauthorized", "version_mismatch"])
def test_a_refused_client_does_not_try_again(code: str) -> None:
    async def client(hub: AsyncHub) -> None:
        with pytest.raises(ClientError) as failed:
            await hub.connect()
        assert failed.value.code == code

    async def refuse(socket: ServerConnection, request: dict[str, Any]) -> None:
        await socket.send(answer(request, "hub:error", {"code": code, "message": "no"}))
        await socket.close(1008)

    assert played(refuse, client) == ["hub:connect"]


def test_a_hub_that_does_not_answer_heartbeats_is_left() -> None:
    connections: list[ServerConnection] = []
    enough = asyncio.Event()

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        assert hub.identity == "@(verified)"
        await enough.wait()

    async def deaf(socket: ServerConnection, request: dict[str, Any]) -> None:
        if request["type"] == "hub:connect":
            connections.append(socket)
            if len(connections) == 3:
                enough.set()
            await socket.send(welcome(request))

    assert "hub:heartbeat" in played(deaf, client, timeouts=Timeouts(heartbeat_s=0.05))


def test_a_question_is_asked_again_under_its_id_after_a_lost_connection() -> None:
    asked: list[str] = []
    registered: list[str] = []

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        await hub.register("@(verified)")
        assert (await hub.request("hub:metrics")).data == {"n": 2}

    async def flaky(socket: ServerConnection, request: dict[str, Any]) -> None:
        match request["type"]:
            case "hub:connect":
                await socket.send(welcome(request, heartbeatInterval=60_000))
            case "hub:register":
                registered.append(request["payload"]["actorAddress"])
                payload = {"actorAddress": "@(verified)", "expiresAt": NOW_MS, "renewalToken": "r"}
                await socket.send(answer(request, "hub:registered", payload))
            case "hub:metrics":
                asked.append(request["id"])
                if len(asked) == 1:
                    socket.transport.abort()
                else:
                    await socket.send(answer(request, "hub:metrics_response", {"n": len(asked)}))
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(flaky, client)
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert registered == ["@(verified)"] * 2


def test_what_a_lost_session_had_not_got_back_is_brought_back_by_the_next() -> None:
    sessions: list[bool] = []
    registered: list[int] = []
    third = asyncio.Event()

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        await hub.register("@(verified)")
        hub._resources.session.drop()
        await third.wait()
        assert hub.resumed

    async def forgetful(socket: ServerConnection, request: dict[str, Any]) -> None:
        """The second session is a new one, and is lost in the middle; the third is the second resumed."""
        match request["type"]:
            case "hub:connect":
                sessions.append(len(sessions) == 2)
                await socket.send(welcome(request, heartbeatInterval=60_000, resumed=sessions[-1]))
            case "hub:register":
                registered.append(len(sessions))
                if len(sessions) == 2:
                    socket.transport.abort()
                    return
                payload = {"actorAddress": "@(verified)", "expiresAt": NOW_MS, "renewalToken": "r"}
                await socket.send(answer(request, "hub:registered", payload))
                if len(sessions) == 3:
                    third.set()
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(forgetful, client)
    assert registered == [1, 2, 3]


def notice(kind: str, payload: Any) -> str:
    return json.dumps(
        {**json.loads(answer({"from": "@(verified)", "id": ""}, kind, payload)), "correlationId": None}
    )


def actor_view(address: str, version: int = 1, connection: str = "s") -> dict[str, Any]:
    return {"address": address, "capabilities": ["x"], "version": version, "connectionId": connection}


def snapshot(watch_id: str, *actors: dict[str, Any], more: bool = False, **members: Any) -> dict[str, Any]:
    return {"watchId": watch_id, "actors": list(actors), "hasMore": more, "offset": "7", **members}


async def collect(hub: AsyncHub, pattern: str, found: list[str], changed: asyncio.Event) -> None:
    async for event in hub.watch(pattern):
        found.append(f"{event.event} {event.actor_address}")
        changed.set()


async def until(changed: asyncio.Event, is_done: Callable[[], bool]) -> None:
    while not is_done():
        changed.clear()
        await changed.wait()


def test_presence_watches_survive_a_connection_that_fails_while_they_are_restored() -> None:
    """The second session is new, and its connection fails at the second watch; the third resumes it."""
    connects: list[str] = []
    opened: list[tuple[int, str]] = []
    removed: list[str] = []
    found: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    changed = asyncio.Event()

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        watching = [asyncio.create_task(collect(hub, name, found[name], changed)) for name in found]
        await until(changed, lambda: all(len(events) == 1 for events in found.values()))
        hub._resources.session.drop()
        await until(changed, lambda: all(len(events) == 3 for events in found.values()))
        await until(changed, lambda: removed == ["b2"])
        for task in watching:
            task.cancel()

    async def failing(socket: ServerConnection, request: dict[str, Any]) -> None:
        payload = request["payload"]
        match request["type"], payload.get("action"):
            case "hub:connect", _:
                connects.append("s")
                await socket.send(
                    welcome(
                        request,
                        heartbeatInterval=60_000,
                        sessionId=f"s{min(len(connects), 2)}",
                        resumed=len(connects) == 3,
                    )
                )
                if len(connects) == 3:
                    # The hub has the watch b2, whose response was lost.
                    for name in ("a2", "b2"):
                        look = snapshot(name, actor_view("@(y)"), resync=True)
                        await socket.send(notice("hub:presence", look))
            case "hub:presence", "watch":
                opened.append((len(connects), payload["pattern"]))
                watch_id = f"{payload['pattern']}{len(connects)}"
                if watch_id == "b2":
                    socket.transport.abort()
                    return
                actor = actor_view("@(x)" if len(connects) == 1 else "@(y)")
                await socket.send(answer(request, "hub:presence", snapshot(watch_id, actor)))
            case "hub:presence", "unwatch":
                if payload["watchId"] == "b2":
                    removed.append(payload["watchId"])
                    changed.set()
                await socket.send(answer(request, "hub:presence", {"event": "unwatched", **payload}))
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(failing, client)
    assert opened == [(1, "a"), (1, "b"), (1, "c"), (2, "a"), (2, "b"), (3, "b"), (3, "c")]
    assert set(map(tuple, found.values())) == {("joined @(x)", "left @(x)", "joined @(y)")}


def test_a_presence_watch_that_cannot_be_restored_ends_with_the_error() -> None:
    connects: list[int] = []

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        events = hub.watch("a")
        assert (await anext(events)).event == "joined"
        hub._resources.session.drop()
        with pytest.raises(ClientError) as refused:
            await anext(events)
        assert refused.value.code == "unauthorized"
        assert (await hub.request("hub:metrics")).data == {}
        assert len(connects) == 2

    async def refusing(socket: ServerConnection, request: dict[str, Any]) -> None:
        match request["type"]:
            case "hub:connect":
                connects.append(1)
                await socket.send(welcome(request, heartbeatInterval=60_000))
            case "hub:presence" if len(connects) == 1:
                look = snapshot("w", actor_view("@(x)"))
                await socket.send(answer(request, "hub:presence", look))
            case "hub:presence":
                payload = {"code": "unauthorized", "message": "no", "retryable": False}
                await socket.send(answer(request, "hub:error", payload))
            case "hub:metrics":
                await socket.send(answer(request, "hub:metrics_response", {}))
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(refusing, client)


@pytest.mark.parametrize("fails", [True, False])
def test_a_new_presence_snapshot_is_loaded_to_its_end(fails: bool) -> None:
    """The snapshot has more pages: an error ends the watch, and later events are applied after it."""

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        events = hub.watch("a")
        assert (await anext(events)).actor_address == "@(x)"
        await hub.request("hub:metrics")
        if fails:
            with pytest.raises(ClientError) as failed:
                await anext(events)
            assert failed.value.code == "offset_gone"
            return
        found = [await anext(events) for _ in range(4)]
        assert [(one.event, one.actor_address) for one in found] == [
            ("left", "@(x)"),
            ("joined", "@(y)"),
            ("joined", "@(z)"),
            ("left", "@(y)"),
        ]

    async def paged(socket: ServerConnection, request: dict[str, Any]) -> None:
        payload = request["payload"]
        match request["type"], payload.get("action"):
            case "hub:connect", _:
                await socket.send(welcome(request, heartbeatInterval=60_000))
            case "hub:presence", "watch":
                look = snapshot("w", actor_view("@(x)"))
                await socket.send(answer(request, "hub:presence", look))
            case "hub:presence", _:
                await socket.send(answer(request, "hub:presence", {"event": "unwatched", **payload}))
            case "hub:metrics", _:
                look = snapshot("w", more=True, resync=True)
                left = {"watchId": "w", "event": "left", "actorAddress": "@(y)", "version": 1}
                await socket.send(notice("hub:presence", look))
                await socket.send(notice("hub:presence", left))
                await socket.send(answer(request, "hub:metrics_response", {}))
            case "hub:discover", _ if fails:
                await socket.send(answer(request, "hub:error", {"code": "offset_gone", "message": "gone"}))
            case "hub:discover", _:
                actors = [actor_view("@(y)"), actor_view("@(z)"), actor_view("@(away)", connection="")]
                await socket.send(answer(request, "hub:discovered", {"actors": actors, "hasMore": False}))
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(paged, client)


def test_pauses_end_with_the_connection() -> None:
    """The hub keeps none of them for a resumed session."""
    connects: list[int] = []
    sent = asyncio.Event()

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        await hub.request("hub:metrics")
        waiting = asyncio.ensure_future(hub.send("@(slow)", "x", 1))
        hub._resources.session.drop()
        await waiting
        await sent.wait()
        assert hub.resumed

    async def pausing(socket: ServerConnection, request: dict[str, Any]) -> None:
        match request["type"]:
            case "hub:connect":
                connects.append(1)
                resumed = len(connects) == 2
                await socket.send(welcome(request, heartbeatInterval=60_000, resumed=resumed))
            case "hub:send":
                sent.set()
            case "hub:metrics":
                await socket.send(notice("hub:pause", {"targets": ["@(slow)"]}))
                await socket.send(answer(request, "hub:metrics_response", {}))
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(pausing, client)


def test_a_paused_recipient_is_left_alone_until_the_hub_says_so() -> None:
    sent: list[str] = []
    both = asyncio.Event()

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        assert await hub.request("hub:metrics")
        waiting = asyncio.ensure_future(hub.send("@(slow)", "x", 1))
        await hub.send("@(quick)", "x", 2)
        await hub.request("hub:metrics")
        await waiting
        await both.wait()

    async def pausing(socket: ServerConnection, request: dict[str, Any]) -> None:
        match request["type"]:
            case "hub:connect":
                await socket.send(welcome(request, heartbeatInterval=60_000))
            case "hub:send":
                sent.append(request["payload"]["to"])
                if len(sent) == 2:
                    both.set()
            case "hub:metrics":
                kind = "hub:resume" if sent else "hub:pause"
                notice = {
                    **json.loads(answer(request, kind, {"targets": ["@(slow)"]})),
                    "correlationId": None,
                }
                await socket.send(json.dumps(notice))
                await socket.send(answer(request, "hub:metrics_response", {}))
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(pausing, client)
    assert sent == ["@(quick)", "@(slow)"]


def test_a_token_is_refreshed_when_the_hub_says_that_it_expires() -> None:
    tokens = iter(["one", "two"])
    seen: list[str] = []
    refreshed = asyncio.Event()

    async def client(hub: AsyncHub) -> None:
        await hub.connect()
        await refreshed.wait()

    async def expiring(socket: ServerConnection, request: dict[str, Any]) -> None:
        match request["type"]:
            case "hub:connect":
                seen.append(request["metadata"]["authToken"])
                await socket.send(welcome(request, heartbeatInterval=60_000))
                notice = {**json.loads(answer(request, "hub:token_expiring", {})), "correlationId": None}
                await socket.send(json.dumps(notice))
            case "hub:refresh_token":
                seen.append(request["metadata"]["authToken"])
                await socket.send(answer(request, "hub:token_refreshed", {"tokenExpiresAt": NOW_MS}))
                refreshed.set()
            case _:
                await socket.send(answer(request, "hub:disconnect", {"acknowledged": True}))

    played(expiring, client, token=lambda: next(tokens))
    assert seen == ["bearer one", "two"]


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [(90_000, 3600), (5, 60), (300, 300)])
def test_a_registration_is_renewed_by_the_time_that_was_given(asked: int, given: int) -> None:
    registration = Registration("@(a)", 0, "token", ttl_seconds=given)
    held = HeldRegistration({"ttlSeconds": asked}, registration)
    before = time.monotonic()
    held.renewed(registration)
    assert before + given / 2 <= held.renew_at <= time.monotonic() + given / 2


Use = Callable[[AsyncHub], Awaitable[Any]]
REFUSED: dict[str, Use] = {
    "ttl_s": lambda hub: hub.register(ttl_s=0),
    "commit": lambda hub: hub.register(commit="never"),
    "capabilities": lambda hub: hub.register(capabilities=()),
    "in_flight_max": lambda hub: hub.register(in_flight_max=0),
    "ack_timeout_s": lambda hub: hub.register(ack_timeout_s=-1),
    "ack": lambda hub: hub.send("@(a)", "t", ack="seen"),  # pyright: ignore[reportArgumentType]
    "ttl_ms": lambda hub: hub.send("@(a)", "t", ttl_ms=0),
    "timeout_s": lambda hub: hub.ask("@(a)", "t", timeout_s=0),
    "priority": lambda hub: hub.send("@(a)", "t", priority=3),
    "producer epoch": lambda hub: hub.send("@(a)", "t", producer=("p", -1, 0)),
    "producer seq": lambda hub: hub.publish("a", "t", producer=("p", 0, -1)),
    "producer id": lambda hub: hub.publish("a", "t", producer=("", 0, 0)),
    "limit": lambda hub: hub.read_mailbox(limit=0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_right_is_refused_without_a_connection(name: str) -> None:
    async def use() -> None:
        await REFUSED[name](AsyncHub("http://127.0.0.1:9"))

    with pytest.raises(ValueError, match=name):
        asyncio.run(use())


def test_timeouts_are_positive() -> None:
    with pytest.raises(ValueError, match="ask_s"):
        Timeouts(ask_s=0)
