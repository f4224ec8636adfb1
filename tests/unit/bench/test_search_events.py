"""The events of the search bench: the same on every machine, whatever their number, and about 1 KiB."""

from __future__ import annotations

import hashlib
from itertools import repeat
from pathlib import Path

import orjson
from bench.evlog.events import block_of, bodies, read_events, write_events
from bench.evlog.queries import aggregate_classes, search_classes


def test_an_event_depends_on_its_seed_and_number_alone() -> None:
    again = hashlib.sha256(orjson.dumps(block_of(1, 3, 86.4))).hexdigest()
    assert again == hashlib.sha256(orjson.dumps(block_of(1, 3, 86.4))).hexdigest()
    assert again.startswith("222d3a78f2e96a3b")
    assert block_of(2, 3, 86.4) != block_of(1, 3, 86.4) != block_of(1, 4, 86.4)


def test_events_are_about_a_kibibyte_and_skewed() -> None:
    events = block_of(1, 0, 86.4)
    size = sum(len(orjson.dumps(event)) for event in events) / len(events)
    services = [event["service"] for event in events]
    assert 800 < size < 1100
    assert services.count("checkout") > 3 * services.count("audit") > 0
    assert len({event["requestId"] for event in events}) == len(events)


def test_a_file_is_cut_into_batches_without_losing_an_event(tmp_path: Path) -> None:
    path = tmp_path / "events.ndjson"
    write_events(path, 1050, 1)
    batches = list(bodies(path, repeat(100)))
    assert [count for count, _ in batches] == [100] * 10 + [50]
    assert [event for _, body in batches for event in orjson.loads(body)] == list(read_events(path))


def test_every_class_of_questions_but_one_has_answers() -> None:
    events = [event for block in range(10) for event in block_of(1, block, 8640.0)]
    silent = [
        one.name
        for one in [*search_classes(events), *aggregate_classes()]
        if not any(question.truth(event) for question in one.questions for event in events)
    ]
    assert silent == ["id that is not there"]
