"""Parts of watch that stand alone: patterns, samples, objectives' windows, published views, shapes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tailrace.common.errors import TailraceError
from tailrace.watch import document_view
from tailrace.watch.cel import compile_cel, expression_shape
from tailrace.watch.document_view import DocumentRow, DocumentView, PurgedTombstones, open_snapshot
from tailrace.watch.names import PartitionPatterns, partition_for_key
from tailrace.watch.predicate import EITHER, UNDECIDED, Predicate, PredicatePart, extract_conditions
from tailrace.watch.predicate_index import DocumentSample, PredicateIndex, ProbeResult
from tailrace.watch.query import read_query
from tailrace.watch.realtime.objectives import BUCKET_S, MINUTES, BurnWindow


def predicate(*filters: tuple[str, str, Any]) -> Predicate:
    listed = [{"field": field, "op": op, "value": value} for field, op, value in filters]
    return Predicate(read_query({"collection": "c", "filters": listed}, live=True).parts)


def test_w5_partitions_by_the_public_hash() -> None:
    known = {"m3": 10, "alice": 0, "😀": 14, "order-1": 6}
    assert {key: partition_for_key(key, 16) for key in known} == known


def test_partitions_of_new_collections_by_their_path() -> None:
    patterns = PartitionPatterns("rooms/*/messages=1, logs=64,rooms/*/*=3", 16)
    assert [patterns(name) for name in ("rooms/a/messages", "logs", "rooms/a/users", "rooms")] == [
        1,
        64,
        3,
        16,
    ]
    for text in ("a", "a=0", "a=257", "a=x"):
        with pytest.raises(TailraceError):
            PartitionPatterns(text, 16)


def test_shapes_hide_every_value() -> None:
    node = compile_cel("doc.a == 'secret' && doc.b in [1, 2] && doc.x.exists(e, e > 7)")[0]
    said = expression_shape(node)
    assert "secret" not in said
    assert not any(digit in said for digit in "127")
    assert said.count("?") == 4


def test_a_sample_tells_how_many_satisfy_a_conjunct() -> None:
    sample = DocumentSample()
    chance = random.Random(1)
    documents = [
        {
            "n": chance.randrange(100),
            "s": chance.choice("ab") + str(chance.randrange(9)),
            "l": [chance.randrange(4)],
        }
        for _ in range(1000)
    ]
    for document in documents:
        sample.add(document)
    for where in (
        "doc.n == 5",
        "doc.n > 89",
        "doc.n >= 10 && doc.n < 20",
        "doc.s.startsWith('a')",
        "doc.s in ['a1', 'b2']",
        "2 in doc.l",
        "has(doc.n)",
        "has(doc.none)",
    ):
        node, program = compile_cel(where)
        (condition,) = extract_conditions(node)
        really = sum(program.holds(doc=document) for document in documents) / len(documents)
        assert abs(sample.share(condition) - really) < 0.03, where


def test_w21_predicates_are_moved_when_documents_are_not_what_was_guessed() -> None:
    index: PredicateIndex[Predicate] = PredicateIndex(10)
    predicates = [predicate(("kind", "==", "same"), ("n", ">", float(number))) for number in range(200)]
    for one in predicates:
        index.add(one)
    assert index.kinds["equal"] == 200, "an equality is the better guess"
    for number in range(300):
        index.sample.add({"kind": "same", "n": -number})
    assert sum(index.rebalance(50) for _ in range(5)) == 200
    assert (index.kinds["range"], index.kinds["equal"]) == (200, 0)
    found: ProbeResult[Predicate] = ProbeResult()
    index.probe({"kind": "same", "n": 10.5}, found)
    candidates = found.sure | found.maybe
    assert {one for one in predicates if one.matches({"kind": "same", "n": 10.5})} <= candidates
    assert len(candidates) < 20
    assert index.rebalance(500) == 0
    for one in predicates:
        index.discard(one)
    assert len(index) == 0
    found = ProbeResult()
    index.probe({"kind": "same", "n": 10.5}, found)
    assert not found.sure
    assert not found.maybe


def test_w21_an_or_of_comparisons_is_true_wherever_it_is_found_unless_it_says_more() -> None:
    said = {
        "doc.a == 'x' || doc.b > 3": EITHER,
        "doc.a == 'x' || doc.b == 1 || doc.c in ['y', 'z']": EITHER,
        "doc.a == 'x' || (doc.b > 3 && doc.b < 9)": EITHER,
        "doc.a == 'x' || (doc.b > 3 && doc.a == 'y')": UNDECIDED,
        "doc.a == 'x' || (doc.b > 3 && size(doc.c) > 2)": UNDECIDED,
        "(doc.a == 'x' || doc.b > 3) && size(doc.c) > 2": UNDECIDED,
        "doc.a == 'x' || 'y' in doc.c": UNDECIDED,
        "doc.a == 'x' || doc.b > 9007199254740993": UNDECIDED,
    }
    for where, lookups in said.items():
        assert Predicate([PredicatePart(*compile_cel(where))]).lookups == lookups, where


def test_windows_forget_what_is_old() -> None:
    window = BurnWindow()
    for _ in range(9):
        window.add(0.0, bad=False)
    window.add(1.0, bad=True)
    assert window.bad_ratio(2.0) == pytest.approx(0.1)
    window.add(BUCKET_S * 2, bad=True)
    assert window.bad_ratio(BUCKET_S * 2) == pytest.approx(2 / 11)
    assert window.bad_ratio(BUCKET_S * (MINUTES + 1)) == 1.0, "the first minute is over"
    assert window.bad_ratio(BUCKET_S * 20) == 0.0


def test_w8_a_published_view_is_the_view(tmp_path: Path) -> None:
    view = DocumentView(tmp_path / "view.db")
    number = view.number_of("default", "orders", 1)
    chance = random.Random(2)
    rows = [
        DocumentRow(
            f"d{place:04}", place % 3, place + 1, 2, 5, 7, int(chance.random() < 0.2), b'{"n":%d}' % place
        )
        for place in range(1200)
    ]
    with view.write_transaction():
        view.apply(number, rows, (), {0: 1198, 1: 1199, 2: 1200})
        view.record_purged(number, 1, PurgedTombstones(9, 44))
        view.record_purged(number, 1, PurgedTombstones(4, 50))
    with open_snapshot(tmp_path / "view.db") as moment:
        parts = [document_view.encode_part(part) for part in document_view.view_parts(moment, number)]
        assert moment.positions(number, 3) == [1198, 1199, 1200]
        assert moment.purged(number, 3)[1] == (9, 50)
    back = [row for part in parts for row in document_view.decode_part(part)]
    assert back == rows
    with pytest.raises(document_view.InvalidViewError):
        document_view.decode_part(parts[0][:100])
    with pytest.raises(document_view.InvalidViewError):
        document_view.decode_head(b"{}")
    view.close()
