# pyright: strict
"""`python -m bench.evlog.costs`: what an event costs without a server: microseconds by stage, bytes by field.

Processor time of this thread, the best of some rounds: that is much steadier than a clock on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import cast

import orjson

from bench.evlog.events import DAY_MS, block_of
from tailrace.log.group_commit import frame_records
from tailrace.log.records import Append
from tailrace.protocol import json_split
from tailrace.schema.json_values import decode_json_record, encode_json_record
from tailrace.schema.profiles.canonical_registries import EVLOG_REGISTRY
from tailrace.schema.profiles.evlog import Evlog, parse_evlog
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.chunks import Chunk, build_columns, join_chunks
from tailrace.search.collector import HitCollector
from tailrace.search.query_language import SEARCH_DIALECT, bind_query
from tailrace.search.ranking import parse_sort
from tailrace.search.records import RecordDecoder, RecordView
from tailrace.search.requests import SearchRequest
from tailrace.search.scan import PieceStatistics, Scanner

BATCH = 1000
CHUNK = 8192
DEPTH_MAX = 512


def evlog_view() -> RecordView:
    """The canonical registry, as a stream has it from its first entry on."""
    return RecordView(
        Registry(
            name="events",
            version=1,
            schemas={1: EVLOG_REGISTRY["schema"]},
            boundaries=(VersionBoundary(0, 1),),
            search=parse_search_config(EVLOG_REGISTRY["search"]),
        )
    )


def spent_us(work: Callable[[], object], events: int, rounds: int) -> float:
    """Microseconds of processor time for each event, at best."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.thread_time()
        work()
        best = min(best, time.thread_time() - begun)
    return best / events * 1e6


def ingest(sent: Sequence[bytes], rounds: int) -> dict[str, float]:
    """The stages of an append of many events, in their order."""
    body = b"[" + b",".join(sent) + b"]"
    normalise = Evlog(parse_evlog({"kind": "evlog"}, "profile")).normalise
    entries = json_split.split_entries(body, DEPTH_MAX)
    stored = [encode_json_record(normalise(decode_json_record(payload), 0)) for payload in sent]
    joined, keys = b",".join(stored), [b"req_0123456789abcdef0123"] * len(sent)
    op = Append(1, 1, len(sent), joined, [len(payload) for payload in stored], 0, keys=keys)
    encoded = op.encode()
    count = len(sent)
    decoded = spent_us(lambda: [decode_json_record(payload) for payload in sent], count, rounds)
    taken = spent_us(lambda: [normalise(decode_json_record(payload), 0) for payload in sent], count, rounds)
    records = [normalise(decode_json_record(payload), 0) for payload in sent]
    return {
        "cut the array": spent_us(lambda: json_split.split_entries(body, DEPTH_MAX), count, rounds),
        "join the entries": spent_us(lambda: json_split.join_entries(entries), count, rounds),
        "decode": decoded,
        "normalise": taken - decoded,
        "encode": spent_us(lambda: [encode_json_record(record) for record in records], count, rounds),
        "journal record": spent_us(op.encode, count, rounds),
        "frame with its checksum": spent_us(lambda: frame_records([encoded], 1), count, rounds),
    }


def index(view: RecordView, payloads: Sequence[bytes], rounds: int) -> dict[str, float]:
    """What the tail index does with events."""
    decoder, entries = RecordDecoder(view, list(view.config.fields)), range(1, len(payloads) + 1)
    members = decoder.all_members(entries, payloads)
    quarter = len(payloads) // 4
    chunks = [
        Chunk(
            entries[begin : begin + quarter],
            build_columns(view.config, decoder.gets, members[begin : begin + quarter]),
        )
        for begin in range(0, 4 * quarter, quarter)
    ]
    count = len(payloads)
    return {
        "decode what is searched": spent_us(lambda: decoder.all_members(entries, payloads), count, rounds),
        "columns and lists": spent_us(
            lambda: build_columns(view.config, decoder.gets, members), count, rounds
        ),
        "join four chunks": spent_us(lambda: join_chunks(view.config, chunks), 4 * quarter, rounds),
    }


def scans(view: RecordView, payloads: Sequence[bytes], rounds: int) -> dict[str, float]:
    """What a search costs for each event that nothing covers: the first time, and when facts are known."""
    found: dict[str, float] = {}
    for title, q in (
        ("an id that is not there", "req:req_nowhere"),
        ("two equalities", "service:checkout status:500"),
        ("a word by score", "timeout"),
        ("a phrase", 'message:"timed out"'),
    ):
        query = bind_query(q, view.config, SEARCH_DIALECT)
        request = SearchRequest(query, 50, parse_sort(None, query, view.config), None, 3000)

        def scan(request: SearchRequest = request, *, counted: bool = True) -> None:
            scanner = Scanner(view, request)
            collector = HitCollector(view, request, scanner, scanner.new_statistics(), 10_000)
            counts = PieceStatistics(scanner.new_statistics()) if counted else None
            entries = range(1, len(payloads) + 1)
            for _, rows in scanner.scan(entries, payloads, counts, time.monotonic() + 600):
                if rows is not None:
                    collector.add_scanned(rows)

        found[title] = spent_us(scan, len(payloads), rounds)
        found[f"{title}, counted before"] = spent_us(
            lambda scan=scan: scan(counted=False), len(payloads), rounds
        )
    return found


def held_bytes(view: RecordView, payloads: Sequence[bytes]) -> dict[str, tuple[float, float]]:
    """Bytes for each event of a chunk, by field: its column, and its inverted lists."""
    decoder = RecordDecoder(view, list(view.config.fields))
    members = decoder.all_members(range(1, len(payloads) + 1), payloads)
    found: dict[str, tuple[float, float]] = {}
    for name, column in build_columns(view.config, decoder.gets, members).items():
        both = column.memory_bytes
        column.drop_lists()
        found[name] = (column.memory_bytes / len(payloads), (both - column.memory_bytes) / len(payloads))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.evlog.costs", description=cast("str", __doc__))
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts (5)")
    rounds = int(parser.parse_args(arguments).rounds)
    events = islice((event for block in range(9) for event in block_of(1, block, DAY_MS / 200_000)), CHUNK)
    sent = [orjson.dumps(event) for event in events]
    normalise = Evlog(parse_evlog({"kind": "evlog"}, "profile")).normalise
    stored = [encode_json_record(normalise(decode_json_record(payload), 0)) for payload in sent]
    view = evlog_view()
    mean = sum(map(len, sent)) / len(sent), sum(map(len, stored)) / len(stored)
    print(f"an event has {mean[0]:.0f} bytes as sent and {mean[1]:.0f} as stored\n")
    for title, stages in (
        ("ingest", ingest(sent[:BATCH], rounds)),
        ("tail index", index(view, stored, rounds)),
        ("scan", scans(view, stored, rounds)),
    ):
        print(f"{title}, microseconds an event")
        for name, spent in stages.items():
            print(f"  {name:40} {spent:7.2f}")
        if title != "scan":
            print(f"  {'together':40} {sum(stages.values()):7.2f}")
        print()
    print("tail index, bytes an event    column   lists")
    held = held_bytes(view, stored)
    for name, (column, lists) in held.items():
        print(f"  {name:26} {column:8.1f} {lists:7.1f}")
    totals = [sum(pair[place] for pair in held.values()) for place in range(2)]
    print(f"  {'together':26} {totals[0]:8.1f} {totals[1]:7.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
