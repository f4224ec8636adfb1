"""Clients of different pace beside each other: what one does not take costs the others nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.watch_room import PacedWire, Room
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.realtime.subscription import resume, subscribe

STREAMS = ("__changes__/default/c/0", "__changes__/default/c/1")


def ask(room: Room, session: RealtimeSession, name: str, **given: Any) -> None:
    payload = {"query": {"collection": "c"}, **given}
    room.harness.call(lambda: subscribe(session, name, payload))


def events(wire: PacedWire) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for envelope in wire.read(100_000):
        if envelope["type"] == "event":
            delta = envelope["payload"]["delta"]
            found.append(
                (envelope["partition"], envelope["seq"], delta["op"], delta["reason"], delta["doc"]["id"])
            )
    return found


def heard_over_resumes(directory: Path, kept: str) -> list[list[tuple[Any, ...]]]:
    """A client that comes and goes, and what it is told of always the same writes, by partition."""
    room = Room(directory, watch_partitions=2, block_cache_bytes=0, watch_audit_retention_ms=0)
    chance = random.Random(4)
    query = {"collection": "c", "where": "doc.n > 3"}
    session, wire = room.connect()
    ask(room, session, "s", query=query)
    token: str = wire.read(1)[0]["payload"]["token"]
    found: list[tuple[Any, ...]] = []
    for _ in range(25):
        for _ in range(chance.randrange(1, 12)):
            data = {"n": chance.randrange(8), "text": "x" * chance.randrange(3000)}
            room.write((chance.choice(("put", "put", "delete")), f"c/d{chance.randrange(9)}", data))
        if kept != "memory":
            room.checkpoint()
        if kept == "cold":
            for stream in filter(None, map(room.harness.find, STREAMS)):
                room.harness.seal(stream)
        if chance.random() < 0.4:
            room.harness.call(session.on_gone)
            session, wire = room.connect()
            given = {"subId": "s", "token": token, "query": query}
            room.harness.call(lambda session=session, given=given: resume(session, "r", given))
        subscription = session.subscriptions["s"]
        room.until(lambda one=subscription: one.state == "live")
        found += events(wire)
        token = room.harness.call(lambda one=subscription: room.gateway.resume_token(one))
    room.close()
    return [[one for one in found if one[0] == partition] for partition in (0, 1)]


def test_w29_what_is_still_in_memory_changes_nothing_that_is_told(tmp_path: Path) -> None:
    told = [heard_over_resumes(tmp_path / kept, kept) for kept in ("memory", "hot", "cold")]
    assert min(map(len, told[0])) > 20
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("stalled", [0, 1, 5])
def test_w35_those_who_read_nothing_delay_nobody(tmp_path: Path, stalled: int) -> None:
    """Times are for the bench. Here: who reads has every event when its write is done, and what the others do
    not take is neither encoded for them nor read from the log until they take something.
    """
    room = Room(
        tmp_path,
        watch_partitions=1,
        watch_outbound_bytes=20_000,
        watch_stall_ms=600_000,
        watch_overflow_ms=600_000,
        watch_audit_retention_ms=0,
    )
    session, wire = room.connect()
    ask(room, session, "s")
    others = [room.connect() for _ in range(stalled)]
    for other, _ in others:
        ask(room, other, "s", query={"collection": "c", "where": "doc.n >= 0"})
    wire.read(1)
    sent: list[int] = []
    for number in range(60):
        room.write(("put", f"c/d{number % 7}", {"n": number, "text": "x" * 1000}))
        assert [seq for _, seq, *_ in events(wire)] == [number + 1], "in the turn in which it became durable"
        room.harness.call(session.on_drain)
        sent.append(sum(len(one.frames) for _, one in others))
    assert {other.subscriptions["s"].state for other, _ in others} <= {"behind"}
    assert sent[-1] == sent[30], "they were sent no more than fits"
    assert all(one.unsent_bytes <= 20_000 + 2000 for _, one in others)
    matcher = room.gateway.all_watched()[0].matcher
    assert len(matcher) == 1, "only those who are told of changes as they happen are looked for"
    for other, one in others:
        seqs = [seq for _, seq, *_ in events(one)]
        while len(seqs) < 60:
            room.harness.call(other.on_drain)
            room.until(lambda one=one: one.frames)
            seqs += [seq for _, seq, *_ in events(one)]
        assert seqs == list(range(1, 61)), "and nothing is missing when they read again"
    room.close()


def test_costly_subscriptions_read_the_log_and_miss_nothing(tmp_path: Path) -> None:
    """What matching may spend at once is bounded; cheap subscriptions hear of a change at once."""
    room = Room(tmp_path, watch_partitions=1, watch_match_steps=3_000, watch_audit_retention_ms=0)
    try:
        cheap, cheap_wire = room.connect()
        ask(room, cheap, "cheap", query={"collection": "c", "where": "doc.n + 1 > 0"})
        costly, costly_wire = room.connect()
        for number in range(40):
            where = f"!doc.l.exists(x, x == {-1 - number})"
            ask(room, costly, f"s{number}", query={"collection": "c", "where": where})
        room.turn(5)
        cheap_wire.read(10)
        costly_wire.read(100)
        for place in range(5):
            room.write(("put", f"c/d{place}", {"n": place, "l": list(range(300))}))
        assert [one[-1] for one in events(cheap_wire)] == [f"d{place}" for place in range(5)]
        heard: dict[str, list[int]] = {}

        def is_told() -> bool:
            for envelope in costly_wire.read(1_000):
                assert envelope["type"] == "event"
                for sub_id in envelope["subIds"]:
                    heard.setdefault(sub_id, []).append(envelope["seq"])
            return sum(map(len, heard.values())) >= 200

        room.until(is_told)
        assert heard == {f"s{number}": [1, 2, 3, 4, 5] for number in range(40)}
        assert room.gateway.demotions > 0
        assert not room.gateway.resyncs
    finally:
        room.close()
