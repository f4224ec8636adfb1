"""What is written to a segment comes back: every byte, every nanosecond, every key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import orjson
import pyarrow.parquet as pq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.segments import Entry, read_all, runs_of, write
from tailrace.storage.segments import reader
from tailrace.storage.segments.reader import Footer
from tailrace.storage.segments.writer import GROUP_BYTES_MAX, GROUP_ROWS_MAX

TIMES = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2_000_000_000_000_000_000) | st.integers(0, 3000)
KEYS = st.none() | st.sampled_from([b"a", b"b", b""]) | st.binary(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
).map(orjson.dumps)
PAYLOADS = st.binary(max_size=60)
COMMON = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entries(payloads: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[Entry]]:
    one = st.builds(Entry, payloads, TIMES, KEYS)
    many = st.builds(lambda made, times: made * times, st.lists(one, min_size=1, max_size=5), st.just(600))
    return st.lists(one, min_size=1, max_size=30) | many


def check(path: Path, given_entries: Sequence[Entry], json: bool, first: int, run: int) -> None:
    made = write(path, runs_of(first, given_entries, json, run), json)
    raw = path.read_bytes()
    assert read_all(made.footer, raw) == given_entries

    info = made.info
    payloads = [entry.payload for entry in given_entries]
    assert (info.first, info.last, info.rows) == (first, first + len(payloads) - 1, len(payloads))
    assert (info.bytes, info.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert info.payload_bytes == sum(map(len, payloads))
    assert (info.first_ns, info.last_ns) == (given_entries[0].time_ns, given_entries[-1].time_ns)
    footer = Footer(made.footer)
    assert footer.facts["payload_sha256"] == hashlib.sha256(b"".join(payloads)).hexdigest()
    assert (footer.json, footer.size, footer.first, footer.last) == (json, len(raw), info.first, info.last)

    # The kept footer can be had from the file again, from its end alone.
    found = reader.find_tail(raw, len(raw))
    assert isinstance(found, bytes)
    assert reader.pack_tail(found) == made.footer

    # Others read the same.
    table = pq.read_table(path, page_checksum_verification=True)
    as_bytes = [value.encode() if json else value for value in table["payload"].to_pylist()]
    assert as_bytes == payloads
    assert table["key"].to_pylist() == [entry.key for entry in given_entries]
    assert table["entry"].to_pylist() == list(range(first, first + len(payloads)))


@COMMON
@given(entries(PAYLOADS), st.integers(1, 2**53), st.integers(1, 700))
@example([Entry(b"", 0)], 1, 1)
@example([Entry(b"", -1, b"")] * 1025, 1, 1025)
@example([Entry(bytes(3 * GROUP_BYTES_MAX), 5, b"big")], 7, 1)
@example([Entry(b"a", 1), Entry(bytes(3 * GROUP_BYTES_MAX), 5), Entry(b"b", 6, b"k")], 7, 2)
def test_bytes(tmp_path: Path, given_entries: list[Entry], first: int, run: int) -> None:
    check(tmp_path / "bytes.parquet", given_entries, False, first, run)


@COMMON
@given(entries(JSON), st.integers(1, 2**53), st.integers(1, 700))
@example([Entry(b'"' + b"x" * 3 * GROUP_BYTES_MAX + b'"', 5)], 7, 1)
@example([Entry(b"[1,2]", 5), Entry(b'","', 5), Entry(b"0", 5)], 1, 3)
def test_json(tmp_path: Path, given_entries: list[Entry], first: int, run: int) -> None:
    check(tmp_path / "json.parquet", given_entries, True, first, run)


@COMMON
@given(st.lists(st.integers(0, 2 * GROUP_BYTES_MAX // 3), min_size=1, max_size=12), st.booleans())
def test_row_groups_are_cut_by_bytes_and_found_by_entry(tmp_path: Path, sizes: list[int], json: bool) -> None:
    given_entries = [Entry(b"7" * (size + 1), index) for index, size in enumerate(sizes)]
    made = write(tmp_path / "cut.parquet", runs_of(1, given_entries, json, 5), json)
    footer = Footer(made.footer)
    groups = footer.row_groups
    for group in groups:
        held = sizes[group.first - 1 : group.last]
        assert 1 <= group.rows <= GROUP_ROWS_MAX
        assert group.rows == 1 or sum(held) <= GROUP_BYTES_MAX
    assert all(left.stop == right.start and left.last + 1 == right.first for left, right in pairwise(groups))
    for entry in range(1, len(sizes) + 1):
        found = groups[footer.find(entry)]
        assert found.first <= entry <= found.last


@COMMON
@given(st.lists(st.integers(0, 4000), min_size=1, max_size=60), st.integers(-10, 4010))
def test_since_never_passes_over_an_entry(tmp_path: Path, steps: list[int], since_ns: int) -> None:
    times = sorted(steps)
    given_entries = [Entry(b"x" * (GROUP_BYTES_MAX // 3), time_ns) for time_ns in times]
    footer = Footer(write(tmp_path / "since.parquet", runs_of(1, given_entries, False, 9), False).footer)
    index = footer.group_since(since_ns)
    expected = next((entry for entry, time_ns in enumerate(times, 1) if time_ns >= since_ns), None)
    if expected is None:
        assert index is None or times[-1] // 1000 == since_ns // 1000
    else:
        assert index is not None
        wanted = footer.find(expected)
        # Statistics know microseconds: the group before may look as if it held the entry.
        assert index == wanted or times[expected - 2] // 1000 == since_ns // 1000


@COMMON
@given(st.lists(KEYS, min_size=1, max_size=5), KEYS.filter(lambda key: key is not None))
def test_a_key_is_never_missed(tmp_path: Path, keys: list[bytes | None], absent: bytes) -> None:
    given_entries = [Entry(b"x", 1, keys[index % len(keys)]) for index in range(2500)]
    footer = Footer(write(tmp_path / "keys.parquet", runs_of(1, given_entries, False), False).footer)
    for key in [*keys, absent]:
        if key is None:
            continue
        expected = {
            index
            for index, group in enumerate(footer.row_groups)
            if any(entry.key == key for entry in given_entries[group.first - 1 : group.last])
        }
        assert expected <= set(footer.groups_with_key(key))
