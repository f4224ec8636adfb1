"""What is remembered of documents whose changes do not say what they were: how much, and for how long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from support.watch_room import DATABASE, Room
from tailrace.log.log import append_to_streams
from tailrace.watch.collection import ENTRY_BYTES, BeforeImageCache, BeforeImageLimits
from tailrace.watch.document import (
    RAW_NULL,
    BeforeUnknownError,
    ChangeEntry,
    ChangeImages,
    PreviousVersion,
    decode_change,
    encode_change,
)
from tailrace.watch.realtime.subscription import resume, subscribe


def filled(bounds: BeforeImageLimits) -> BeforeImageCache:
    befores = BeforeImageCache(bounds, [0, 0])
    for seq in range(1, 11):
        befores.add(seq % 2, seq, seq * 100, b"x" * 50)
    return befores


@pytest.mark.parametrize(
    "bounds",
    [
        BeforeImageLimits(4, 1 << 20, 1 << 20),
        BeforeImageLimits(1000, 4 * (50 + ENTRY_BYTES), 1 << 20),
        BeforeImageLimits(1000, 1 << 20, 300),
    ],
)
def test_the_oldest_go_first(bounds: BeforeImageLimits) -> None:
    befores = filled(bounds)
    assert len(befores) == 4
    assert befores.size_bytes == 4 * (50 + ENTRY_BYTES)
    assert [seq for seq in range(1, 11) if befores.find(seq % 2, seq) is not None] == [7, 8, 9, 10]
    assert befores.evicted == [6, 5]
    assert befores.covers([6, 5])
    assert not befores.covers([5, 5])
    assert not befores.covers([6, 4])


def test_w28_only_what_is_remembered_can_be_resumed(tmp_path: Path) -> None:
    room = Room(tmp_path, watch_partitions=1, watch_window_changes=3, watch_audit_retention_ms=0)
    assert json.loads(room.configure("c", storeBefore=False).answer)["storeBefore"] is False
    room.write(("put", "c/a", {"n": 0}))
    tokens: list[str] = []
    asked: dict[str, Any] = {"query": {"collection": "c", "where": "doc.n > 5"}}
    for number in range(1, 9):
        session, wire = room.connect()
        room.harness.call(lambda session=session: subscribe(session, "s", asked))
        tokens.append(wire.read(1)[0]["payload"]["token"])
        room.write(("put", "c/a", {"n": number % 2 * 10}))
    collection = room.book.find(DATABASE, "c")
    assert collection is not None
    assert collection.before_images is not None
    assert len(collection.before_images) == 3
    for behind, token in enumerate(reversed(tokens), start=1):
        session, wire = room.connect()
        given = {"subId": "s", "token": token, **asked}
        room.harness.call(lambda session=session, given=given: resume(session, "r", given))
        room.turn(10)
        told = wire.read(100)
        if behind <= 3:
            ops = [one["payload"]["delta"]["op"] for one in told if one["type"] == "event"]
            assert ops == ["delete", "insert", "delete"][3 - behind :]
        else:
            assert told[0]["payload"]["reason"] == "too-far-behind"
            assert told[1]["type"] == "resync-required"
    room.close()


def test_a_log_without_images_is_told_from_one_that_has_them(tmp_path: Path) -> None:
    """Deletes keep theirs: a tombstone has the last content."""
    room = Room(tmp_path, watch_partitions=1, watch_audit_retention_ms=0)
    room.configure("c", storeBefore=False)
    room.write(("put", "c/a", {"n": 1}), ("put", "c/a", {"n": 2}), ("delete", "c/a", None))
    room.configure("c", storeBefore=True)
    room.write(("put", "c/a", {"n": 3}), ("put", "c/a", {"n": 4}))
    log = room.harness.log
    page = room.harness.run(
        log.reader.read_labelled(log.existing("__changes__/default/c/0"), 0, 1 << 20, 100)
    )
    changes = [decode_change(bytes(raw), 0, seq, 0) for seq, raw in enumerate(page.parts, start=1)]
    assert [change is not None and change.lacks_before_image for change in changes] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert changes[1] is not None
    with pytest.raises(BeforeUnknownError):
        _ = changes[1].before
    befores = [one.before for one in room.heard[room.life_of("c")]]
    assert [None if one is None else one["n"] for one in befores] == [None, 1, 2, None, 3]
    room.close()


def test_what_cannot_be_known_is_a_gap(tmp_path: Path) -> None:
    """A change that does not follow what the view has: nobody is told half of what happened."""
    room = Room(tmp_path, watch_partitions=1, watch_audit_retention_ms=0)
    room.configure("c", storeBefore=False)
    room.write(("put", "c/a", {"n": 1}))
    session, wire = room.connect()
    room.harness.call(lambda: subscribe(session, "s", {"query": {"collection": "c"}}))
    assert [one["type"] for one in wire.read(10)] == ["subscribe_ack"]
    entry = ChangeEntry(
        database=DATABASE,
        collection="c",
        documentKey="a",
        op="replace",
        before=RAW_NULL,
        after=Raw(b'{"n":9}'),
        images=ChangeImages("view", "full"),
        version=9,
        createdAt=0,
        prev=PreviousVersion(8, 0),
        txn=None,
        commitTime="",
    )
    room.book.on_applied = room.gateway.on_applied
    parts = [("__changes__/default/c/0", [encode_change(entry)])]
    now_ns = room.harness.clock.now_ns()
    room.harness.call(lambda: append_to_streams(room.harness.log, parts, now_ns, lambda *_: None, None))
    room.harness.settle()
    told = [(one["type"], one["payload"].get("reason")) for one in wire.read(10)]
    assert told == [("resync-required", "gap")]
    room.close()
