"""Watch in one process: sizes of snapshots, who is shed first, what is counted, what the view comes to."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.watch_room import DATABASE, PacedWire, Room
from tailrace.auth import ANONYMOUS
from tailrace.log.records import Trim
from tailrace.watch.document import decode_change
from tailrace.watch.external_jobs import SubscriptionSummaries
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.realtime.subscription import resume, subscribe


def ask(room: Room, session: RealtimeSession, name: str, **given: Any) -> None:
    payload = {"query": {"collection": "c"}, **given}
    room.harness.call(lambda: subscribe(session, name, payload))


def fill(room: Room, count: int) -> None:
    for begin in range(0, count, 2000):
        writes = [
            ("put", f"c/d{number:06}", {"n": number}) for number in range(begin, min(count, begin + 2000))
        ]
        room.write(*writes)


def snapshot(room: Room, wire: PacedWire) -> tuple[list[str], dict[str, Any]]:
    ids: list[str] = []
    while True:
        room.until(lambda: wire.frames)
        for envelope in wire.read(1):
            if envelope["type"] == "snapshot":
                ids += [row["id"] for row in envelope["payload"]["documents"]]
            elif envelope["type"] == "snapshot-end":
                return ids, envelope["payload"]


def complete(tmp_path: Path, count: int) -> None:
    room = Room(tmp_path, watch_audit_retention_ms=0)
    fill(room, count)
    session, wire = room.connect()
    ask(room, session, "s", sendSnapshot=True)
    ids, end = snapshot(room, wire)
    assert ids == [f"d{number:06}" for number in range(count)]
    assert end["count"] == count
    assert sum(end["positions"]) == count
    room.close()


@pytest.mark.parametrize("count", [0, 1, 500, 999, 1000, 1001])
def test_w19_snapshots_of_every_size_are_complete(tmp_path: Path, count: int) -> None:
    complete(tmp_path, count)


@pytest.mark.nightly
def test_w19_a_large_snapshot_is_complete(tmp_path: Path) -> None:
    complete(tmp_path, 100_000)


def test_w23_a_subscription_gets_what_comes_after_it_and_nothing_before(tmp_path: Path) -> None:
    room = Room(tmp_path, watch_partitions=1, watch_audit_retention_ms=0)
    session, wire = room.connect()
    for number in range(30):
        room.write(("put", "c/a", {"n": number}))
        ask(room, session, f"s{number}")
    acknowledged: dict[str, int] = {}
    seen: dict[str, list[int]] = {}
    for envelope in wire.read(10_000):
        if envelope["type"] == "subscribe_ack":
            acknowledged[envelope["id"]] = envelope["payload"]["positions"][0]
        else:
            for name in envelope["subIds"]:
                seen.setdefault(name, []).append(envelope["seq"])
    for name, position in acknowledged.items():
        assert seen.get(name, []) == list(range(position + 1, 31))
    room.close()


def test_w33_what_can_wait_is_shed_first(tmp_path: Path) -> None:
    """However full the gateway is: as long as one that can wait is live, no other steps back."""
    room = Room(
        tmp_path,
        watch_outbound_bytes=1_000_000,
        watch_outbound_total_bytes=100_000,
        watch_audit_retention_ms=0,
    )
    gateway = room.gateway
    pairs = [room.connect() for _ in range(4)]
    for session, _ in pairs:
        for priority in ("low", "normal", "high"):
            ask(room, session, priority, priority=priority)
    room.write(("put", "c/a", {"text": "x" * 5000}))

    def states(priority: str) -> set[str]:
        return {session.subscriptions[priority].state for session, _ in pairs}

    room.harness.call(gateway._tick)
    assert states("low") == states("normal") == states("high") == {"live"}
    for turn in range(2):
        room.write(("put", "c/a", {"text": "x" * 12_000, "turn": turn}))
    assert sum(wire.unsent_bytes for _, wire in pairs) / 100_000 >= 0.7
    gateway.level = 0.0
    room.harness.call(gateway._tick)
    assert states("low") == {"behind"}
    if gateway.level < 0.9:
        assert states("normal") == states("high") == {"live"}
    session, _ = room.connect()
    asked = {"query": {"collection": "c"}, "priority": "low"}
    with pytest.raises(Exception, match="too many unsent bytes"):
        room.harness.call(lambda: subscribe(session, "late", asked))
    for _, wire in pairs:
        wire.read(10_000)
    for session, _ in pairs:
        room.harness.call(session.on_drain)
    room.harness.call(gateway._tick)
    assert not gateway.shedding
    room.until(lambda: states("low") == {"live"})
    room.close()


def test_a_collection_behind_its_source_breaks_a_promise_before_anybody_is_told(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    objectives = room.gateway.objectives
    room.configure("c", slo={"lagMs": 2000})
    collection = room.book.find(DATABASE, "c")
    assert collection is not None
    objectives.lag_ms = lambda _: 5000.0
    burn = objectives.burn_rates(DATABASE, "c", collection)
    assert burn == {"delivery": 0.0, "resume": 0.0, "lag": 2.5, "bloom": 0.0}
    assert objectives.explain(collection, burn) == "The collection is more than 2000 ms behind its source."
    room.harness.call(objectives.on_tick)
    assert (["lag"], 2.5) in objectives.worst_burn_rates()
    room.close()


def test_a_broken_promise_is_told_and_what_can_wait_does(tmp_path: Path) -> None:
    room = Room(tmp_path)
    gateway = room.gateway
    room.configure("c", slo={"deliveryMs": 100})
    session, _ = room.connect()
    for priority in ("low", "normal"):
        ask(room, session, priority, priority=priority)
    watched, collection = gateway.all_watched()[0], room.book.find(DATABASE, "c")
    assert collection is not None
    now_ms = room.harness.clock.now_ns() // 1_000_000

    def burn() -> float:
        return gateway.objectives.burn_rates(DATABASE, "c", collection)["delivery"]

    def deliver(late_ms: int, times: int) -> None:
        for _ in range(times):
            gateway.objectives.record_delivery(watched, now_ms - late_ms)

    deliver(late_ms=101, times=19)
    assert burn() == 0.0, "too few to say anything"
    deliver(late_ms=101, times=1)
    assert burn() == pytest.approx(100.0)
    assert gateway.demotions == 0
    room.harness.call(gateway.objectives.on_tick)
    assert gateway.demotions == 1, "the one that can wait, and it comes back when it has caught up"
    assert session.subscriptions["normal"].state == "live"
    assert "100 ms" in gateway.objectives.explain(
        collection, gateway.objectives.burn_rates(DATABASE, "c", collection)
    )
    room.until(lambda: session.subscriptions["low"].state == "live")
    deliver(late_ms=100, times=5000)
    assert burn() < 1
    room.harness.call(gateway.audit.flush)
    room.harness.settle()
    log = room.harness.log
    page = room.harness.run(log.reader.read(log.existing("__audit__"), 0, 1_000_000, 100))
    assert b'"slo.burning"' in b"".join(map(bytes, page.parts))
    room.close()


def test_w49_what_is_counted_is_what_was_sent(tmp_path: Path) -> None:
    room = Room(tmp_path, watch_partitions=2, watch_audit_retention_ms=0)
    chance = random.Random(8)
    pairs = [room.connect() for _ in range(3)]
    for session, _ in pairs:
        for number in range(3):
            where = chance.choice(("doc.n > 5", "doc.n <= 5", "true"))
            ask(room, session, f"s{number}", query={"collection": "c", "where": where})
    for _ in range(120):
        op = chance.choice(("put", "put", "patch", "delete"))
        room.write((op, f"c/d{chance.randrange(9)}", {"n": chance.randrange(12)}))
    sent = {"insert": 0, "update": 0, "delete": 0}
    for _, wire in pairs:
        for envelope in wire.read(100_000):
            if envelope["type"] == "event":
                sent[envelope["payload"]["delta"]["op"]] += len(envelope["subIds"])
    assert room.gateway.deliveries == sent
    heard = [one for life in room.heard.values() for one in life]
    tally = room.book.counters.for_collection(room.book.find(DATABASE, "c"))
    assert tally.changes.total() == len(heard)
    candidates, hits, _ = room.gateway.match_counts()[tally.labels]
    assert candidates >= hits > 0
    assert sum(tally.latency.counts) == len(heard)
    room.close()


def test_w8_the_view_is_the_fold_of_the_log_whatever_happens(tmp_path: Path) -> None:
    room = Room(tmp_path, watch_partitions=3, watch_audit_retention_ms=0)
    chance = random.Random(11)
    model: dict[str, tuple[int, dict[str, Any]]] = {}
    versions: dict[str, int] = {}
    for step in range(130):
        name = f"d{chance.randrange(12)}"
        op = chance.choice(("put", "put", "delete"))
        data = {"n": step, "text": "x" * chance.randrange(400)}
        (result,) = room.write((op, f"c/{name}", data))
        if result.error is None and (op == "put" or name in model):
            versions[name] = versions.get(name, 0) + 1
            assert result.version == versions[name]
            if op == "put":
                model[name] = (versions[name], data)
            else:
                del model[name]
        if step % 23 == 22:
            room.checkpoint()
        if step % 41 == 40:
            room.crash(chance.randrange(3))
        if step % 61 == 60:
            for path in room.harness.directory.glob("watch.db*"):
                path.unlink()
            room.crash(0)
        if step % 10 == 9:
            found = {key: (version, json.loads(raw)) for key, (version, raw) in room.rows("c").items()}
            assert found == model, step
    room.close()


def test_w28_a_view_that_cannot_be_made_again_is_no_silent_loss(tmp_path: Path) -> None:
    room = Room(tmp_path, watch_partitions=1, watch_audit_retention_ms=0)
    for number in range(6):
        room.write(("put", f"c/d{number}", {"n": number}))
    stream = room.harness.find("__changes__/default/c/0")
    assert stream is not None
    room.checkpoint()
    room.harness.seal(stream)
    room.harness.call(lambda: room.harness.log.record_objects(Trim(stream.number, 6, 0, 1, 0)))
    room.harness.settle()
    for number in range(6, 9):
        room.write(("put", f"c/d{number}", {"n": number}))
    session, wire = room.connect()
    ask(room, session, "s")
    token = wire.read(1)[0]["payload"]["token"]
    for path in room.harness.directory.glob("watch.db*"):
        path.unlink()
    room.crash(0)
    assert set(room.rows("c")) == {"d6", "d7", "d8"}, "what is left of the changes"
    for _ in range(2):
        session, wire = room.connect()
        given = {"subId": "s", "token": token, "query": {"collection": "c"}}
        room.harness.call(lambda session=session, given=given: resume(session, "r", given))
        assert wire.read(1)[0]["payload"]["reason"] == "generation"
        room.crash(0)
    room.close()


def test_w45_nobody_is_told_what_they_may_not_read(tmp_path: Path) -> None:
    from tailrace.auth import Identity

    room = Room(tmp_path, watch_partitions=1, watch_audit_retention_ms=0)
    room.configure("c", readRule="doc.org == request.auth.claims.org")
    pairs = {
        org: room.connect(
            Identity(
                sub=org,
                scopes=frozenset({"read"}),
                dbs=(DATABASE,),
                claims=json.dumps({"org": org}).encode(),
            )
        )
        for org in ("one", "two")
    }
    nobody, silent = room.connect(ANONYMOUS)
    ask(room, nobody, "s", query={"collection": "c"}, sendSnapshot=True)
    for session, _ in pairs.values():
        ask(room, session, "s", query={"collection": "c", "where": "doc.n > 3"}, sendSnapshot=True)
        ask(room, session, "t", query={"collection": "c"}, includeData=True)
    room.turn(20)
    chance = random.Random(5)
    for _ in range(150):
        org = chance.choice(("one", "two"))
        data = {"org": org, "n": chance.randrange(8), "secret": f"of {org}"}
        room.write((chance.choice(("put", "put", "delete")), f"c/d{chance.randrange(5)}", data))
    for org, (_, wire) in pairs.items():
        other = "two" if org == "one" else "one"
        frames = wire.frames
        assert frames
        assert not any(f"of {other}".encode() in frame.body for frame in frames)
        reasons = {
            envelope["payload"]["delta"]["reason"]
            for envelope in wire.read(100_000)
            if envelope["type"] == "event"
        }
        assert {"hidden", "visible"} <= reasons
    assert not any(b"secret" in frame.body for frame in silent.frames), "a rule that cannot be decided denies"
    room.close()


def test_summaries_are_written_anew_so_that_older_ones_may_go(tmp_path: Path) -> None:
    room = Room(tmp_path, watch_audit_retention_ms=0)
    fill(room, 1)
    session, _ = room.connect()
    ask(room, session, "s")
    subscription = session.subscriptions["s"]
    summaries = SubscriptionSummaries(room.context, room.gateway)
    first = room.harness.run(summaries.request_summaries(60, ANONYMOUS))
    stream = room.harness.log.find(summaries.stream)
    assert stream is not None
    assert subscription.summary_entry == stream.visible == 3, "a mark, one subscription, and that all is said"
    assert [one.number for one in summaries.bounds()] != [stream.number]
    again = room.harness.run(summaries.request_summaries(60, ANONYMOUS))
    assert (first["subscriptions"], again["subscriptions"]) == (1, 1)
    before = stream.visible
    assert before == 4, "nothing has changed"
    room.harness.clock.advance(3600)
    room.harness.run(summaries.request_summaries(60, ANONYMOUS))
    assert stream.visible == before + 3
    assert subscription.summary_entry == 3, "it has been known since then"
    bounds = {one.number: one.upto for one in summaries.bounds()}
    assert bounds[stream.number] == before
    room.harness.call(summaries.stop)
    room.harness.call(room.gateway.delivered.stop)
    room.close()


def test_w6_nothing_that_is_done_to_the_log_moves_a_change(tmp_path: Path) -> None:
    room = Room(tmp_path, watch_partitions=2, watch_audit_retention_ms=0)
    for number in range(20):
        room.write(("put", f"c/d{number % 5}", {"n": number}))

    def entries(partition: int) -> dict[int, tuple[str, int]]:
        log = room.harness.log
        stream = log.find(f"__changes__/default/c/{partition}")
        assert stream is not None
        page = room.harness.run(log.reader.read_labelled(stream, stream.earliest, 1 << 24, 1000))
        changes = [
            decode_change(bytes(raw), partition, seq, 0)
            for seq, raw in zip(page.entries(), page.parts, strict=True)
        ]
        return {one.seq: (one.entry.documentKey, one.entry.version) for one in changes if one is not None}

    before, life = [entries(partition) for partition in (0, 1)], room.life_of("c")
    for partition in (0, 1):
        stream = room.harness.find(f"__changes__/default/c/{partition}")
        assert stream is not None
        room.checkpoint()
        room.harness.seal(stream)
        number = stream.number
        room.harness.call(lambda number=number: room.harness.log.record_objects(Trim(number, 2, 0, 1, 0)))
        room.harness.settle()
    room.crash(0)
    after = [entries(partition) for partition in (0, 1)]
    assert room.life_of("c") == life
    for was, now in zip(before, after, strict=True):
        assert now == {seq: one for seq, one in was.items() if seq > 2}
    results = [room.write(("put", f"c/d{number}", {"n": -1}))[0] for number in range(5)]
    assert [result.version for result in results] == [5] * 5
    positions = [max(entries(partition)) for partition in (0, 1)]
    assert sum(positions) == 25
    room.close()
