"""The way of a source's changes into the log: whatever is given again, each is there once, in its order."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.watch_room import DATABASE, PacedWire, Room
from tailrace.watch.collection import Collection
from tailrace.watch.document import decode_change
from tailrace.watch.names import partition_for_key
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.realtime.subscription import subscribe
from tailrace.watch.sources.config import read_source_config
from tailrace.watch.sources.ingest import SourceIngest, SourceLifecycle, SupersededError
from tailrace.watch.sources.model import CollectionProgress, SourceChange

CONFIG = read_source_config(
    DATABASE,
    "src",
    {"kind": "postgres", "dsn": {"env": "PG"}, "collections": {"public.c": {"collection": "c"}}},
)
Message = tuple[SourceChange, ...]
Told = tuple[str, int, str, str]  # position, index, document, operation


def put(lsn: int, ordinal: int, key: str) -> SourceChange:
    data = json.dumps({"at": [lsn, ordinal]}).encode()
    return SourceChange(lsn, ordinal, str(lsn), "2026-01-01T00:00:00Z", "put", "c", key, data)


def delete(lsn: int, ordinal: int, key: str) -> SourceChange:
    return SourceChange(lsn, ordinal, str(lsn), "2026-01-01T00:00:00Z", "delete", "c", key)


def messages_of(chance: random.Random, commits: int) -> list[Message]:
    """What a database says; a key that changes is one message and two changes."""
    found: list[Message] = []
    for lsn in range(1, commits + 1):
        for ordinal in range(chance.randrange(1, 5)):
            key, other = chance.sample([f"d{number}" for number in range(6)], 2)
            kind = chance.choice(("put", "put", "delete", "key"))
            if kind == "key":
                found.append((delete(lsn, ordinal, key), put(lsn, ordinal, other)))
            else:
                found.append(((put if kind == "put" else delete)(lsn, ordinal, key),))
    return found


def changes_of(messages: list[Message]) -> list[SourceChange]:
    return [change for message in messages for change in message]


class Place:
    """A room with a collection that follows a source."""

    def __init__(self, directory: Path) -> None:
        self.room = Room(directory, watch_audit_retention_ms=0)
        self.room.configure("c", partitions=2)

    @property
    def collection(self) -> Collection:
        found = self.room.book.find(DATABASE, "c")
        assert found is not None
        return found

    def states(self) -> SourceLifecycle:
        """Somebody who takes the source for theirs."""
        room = self.room
        collections = {"c": self.collection}
        states = SourceLifecycle(
            room.book, room.gateway, DATABASE, CONFIG, collections, 1 << 20, lambda _: None
        )
        room.harness.run(states.raise_epoch())
        return states

    def follow(self, ingest: SourceIngest, messages: list[Message]) -> None:
        self.room.harness.run(ingest.follow(changes_of(messages)))

    def follow_and_be_cut(self, ingest: SourceIngest, messages: list[Message], turns: int) -> None:
        async def some() -> None:
            following = asyncio.ensure_future(ingest.follow(changes_of(messages)))
            for _ in range(turns):
                await asyncio.sleep(0)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

        self.room.harness.run(some())
        self.room.crash(0)

    def told(self) -> list[list[Told]]:
        """Every change of the log, by partition."""
        log, found = self.room.harness.log, list[list[Told]]()
        for name in self.collection.streams():
            stream = log.find(name)
            parts: list[Any] = []
            if stream is not None:
                page = self.room.harness.run(log.reader.read_labelled(stream, 0, 1 << 24, 10_000))
                assert page.next_entry == stream.visible
                parts = list(page.parts)
            changes = [change for raw in parts if (change := decode_change(bytes(raw), 0, 0, 0)) is not None]
            found.append(
                [
                    (one.lsn or "", 0 if one.entry.txn is None else one.entry.txn.index, *_about(one.entry))
                    for one in changes
                ]
            )
        return found


def _about(entry: Any) -> tuple[str, str]:
    return entry.documentKey, entry.op


def expected(directory: Path, messages: list[Message]) -> list[list[Told]]:
    """What is there if nothing happens but the messages, once and in order."""
    place = Place(directory)
    place.follow(place.states().ingest(), messages)
    found = place.told()
    place.room.close()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_w3_whatever_is_given_again_is_there_once(tmp_path: Path, seed: int) -> None:
    """Messages repeated back to back, older ones in between, restarts at any moment."""
    chance = random.Random(seed)
    messages = messages_of(chance, 40)
    place = Place(tmp_path / "place")
    states = place.states()
    ingest, reached = states.ingest(), 0
    while reached < len(messages):
        begin = max(0, reached - chance.randrange(6))
        end = min(len(messages), begin + chance.randrange(1, 12))
        batch: list[Message] = []
        for message in messages[begin:end]:
            batch += [message] * chance.choice((1, 1, 2))
            if chance.random() < 0.2:
                batch.append(chance.choice(messages[: begin + 1]))
        if chance.random() < 0.3:
            place.follow_and_be_cut(ingest, batch, chance.randrange(6))
            states = place.states()
            ingest = states.ingest()
            last = states.progress.position.place
            reached = sum((message[0].lsn, message[0].ordinal) <= last for message in messages)
        else:
            place.follow(ingest, batch)
            reached = max(reached, end)
    found = place.told()
    place.room.close()
    assert found == expected(tmp_path / "expected", messages)
    for partition in found:
        assert partition == sorted(partition, key=lambda one: one[:2])


def test_w4_of_two_that_follow_a_source_the_older_one_stops(tmp_path: Path) -> None:
    messages = messages_of(random.Random(9), 12)
    place = Place(tmp_path / "place")
    older = place.states()
    first = older.ingest()
    place.follow(first, messages[:10])
    newer = place.states()
    with pytest.raises(SupersededError) as refused:
        place.follow(first, messages[8:14])
    assert refused.value.code == "stale_epoch"
    second = newer.ingest()
    place.follow(second, messages[6:20])
    for attempt in (lambda: place.follow(first, messages[10:]), older.ingest):
        with pytest.raises(SupersededError):
            attempt()
    place.follow(second, messages[18:])
    found = place.told()
    place.room.close()
    assert found == expected(tmp_path / "expected", messages)


def marked(place: Place, *logs: str) -> SourceIngest:
    """A source whose collections have logs of their own."""
    ingest = place.states().ingest()
    marks = {name: CollectionProgress(token=f"{name}0", lsn=5) for name in logs}
    place.room.harness.run(ingest.commit_progress(ingest.progress.with_changes(marks=marks)))
    return ingest


def test_a_log_of_its_own_has_a_place_of_its_own(tmp_path: Path) -> None:
    place = Place(tmp_path)
    run = place.room.harness.run
    ingest = marked(place, "c", "other")
    run(ingest.load(place.collection, [("a", b"{}")]))
    run(ingest.follow_one("c", [put(9, 0, "b"), put(9, 1, "a")], "c1"))
    run(ingest.follow_one("other", [], "other1"))
    place.room.crash(0)
    ingest = place.states().ingest()
    marks = ingest.progress.marks
    assert marks["c"] == CollectionProgress(token="c1", lsn=9, ordinal=1, index=1)
    assert marks["other"] == CollectionProgress(token="other0", lsn=5), (
        "nothing came of it, so it is read again"
    )
    run(ingest.follow_one("c", [put(9, 1, "a"), put(9, 2, "b")], "c2"))
    assert ingest.repeats == 1
    assert sorted(one for partition in place.told() for one in partition) == [
        ("0000000000000005", 0, "a", "insert"),
        ("0000000000000009", 0, "b", "insert"),
        ("0000000000000009", 1, "a", "update"),
        ("0000000000000009", 2, "b", "update"),
    ]
    place.room.close()


def test_the_end_of_a_log_is_remembered_until_there_is_more(tmp_path: Path) -> None:
    place = Place(tmp_path)
    run = place.room.harness.run
    ingest = marked(place, "c")
    ended = ingest.progress.with_mark("c", ingest.progress.position_in("c"), "end", ended=True)
    run(ingest.commit_progress(ended))
    run(ingest.follow_one("c", [], "end"))
    assert ingest.progress.marks["c"].ended
    run(ingest.follow_one("c", [put(9, 0, "a")], "c1"))
    assert not ingest.progress.marks["c"].ended
    place.room.close()


def test_w13_of_what_was_not_found_nothing_is_told(tmp_path: Path) -> None:
    place = Place(tmp_path)
    room, run = place.room, place.room.harness.run
    ingest = marked(place, "c")
    lost = put(7, 0, "a")._replace(image="missing", data=b"", token="t7")
    run(ingest.follow_one("c", [lost], "t7"))  # nor was the document ever seen
    run(ingest.follow_one("c", [put(8, 0, "a")._replace(token="t8")], "t8"))
    told = put(10, 0, "a")._replace(image="lookup", before=b'{"at": [8, 0]}', token="t10")
    newer = put(11, 0, "a")._replace(replaces=True, before=b"{}", token="t11")
    run(ingest.follow_one("c", [lost._replace(lsn=9, token="t9"), told, newer], "t11"))
    stream = room.harness.log.find(place.collection.stream(partition_for_key("a", 2)))
    assert stream is not None
    page = run(room.harness.log.reader.read_labelled(stream, 0, 1 << 20, 100))
    entries = [json.loads(bytes(raw)) for raw in page.parts]
    found = [(one["op"], one["version"], *one["images"].values(), one["source"]["token"]) for one in entries]
    assert found == [
        ("insert", 1, "none", "full", "t8"),
        ("update", 1, "view", "missing", "t9"),
        ("update", 2, "full", "lookup", "t10"),
        ("replace", 3, "view", "full", "t11"),
    ]
    assert entries[1]["after"] is None
    assert entries[2]["before"] == {"at": [8, 0]}, "the view has kept its row"
    assert entries[3]["before"] == {"at": [10, 0]}, "what was told of it, whatever it was"
    place.room.close()


def ask(place: Place, session: RealtimeSession) -> None:
    given = {"query": {"collection": "c"}, "sendSnapshot": True}
    place.room.harness.call(lambda: subscribe(session, "s", given))


def kinds_of(wire: PacedWire) -> list[str]:
    return [envelope["type"] for envelope in wire.read(1000)]


def test_w34_between_a_gap_and_live_nobody_is_told_of_a_change(tmp_path: Path) -> None:
    place = Place(tmp_path)
    room, states = place.room, place.states()
    ingest = states.ingest()
    place.follow(ingest, [(put(1, 0, "a"), put(1, 1, "b"))])
    session, wire = room.connect()
    ask(place, session)
    room.until(lambda: session.subscriptions["s"].state == "live")
    assert kinds_of(wire) == ["subscribe_ack", "snapshot", "snapshot-end"]
    room.harness.run(states.mark_stale("the slot is gone", rescan=True))
    told = wire.read(1000)
    assert [(one["type"], one["payload"].get("reason")) for one in told] == [("resync-required", "stale")]
    ask(place, session)
    ingest = states.ingest()
    room.harness.run(states.begin_load(ingest, ingest.progress))
    assert kinds_of(wire) == ["subscribe_ack", "resync-required"], "another generation"
    ask(place, session)
    room.harness.run(ingest.load(place.collection, [("b", b'{"at":"the source"}'), ("c", b"{}")]))
    room.harness.run(ingest.remove(place.collection, ["a"]))
    place.follow(ingest, [(put(2, 0, "d"),)])
    room.turn(20)
    assert kinds_of(wire) == ["subscribe_ack"]
    room.harness.run(states.end_load(ingest))
    room.until(lambda: session.subscriptions["s"].state == "live")
    told = wire.read(1000)
    assert [one["type"] for one in told] == ["snapshot", "snapshot-end"]
    assert [row["id"] for row in told[0]["payload"]["documents"]] == ["b", "c", "d"]
    room.close()
