"""Deliveries from outside: whatever becomes of batches on their way, every event is sent once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.watch.external_matching import (
    DeliveredChange,
    DeliveredMatch,
    DeliveryBatch,
    ExaminedRanges,
    RelevantRange,
    decode_delivery,
    encode_delivery,
)

SUBS = ("c/1", "c/2", "c/3")
Matches = dict[int, tuple[str, ...]]  # by number: who is concerned


def batch_of(
    first: int, last: int, matches: Matches, *, epoch: int = 0, generation: int = 1, as_of: int = 9
) -> DeliveryBatch:
    items = [
        DeliveredChange(
            seq,
            str(seq),
            "update",
            [DeliveredMatch(key, "update", "changed") for key in keys],
            {"id": str(seq)},
        )
        for seq, keys in matches.items()
        if first <= seq <= last and keys
    ]
    return DeliveryBatch(
        database="d",
        collection="c",
        partition=0,
        owner="m",
        leaseEpoch=epoch,
        generation=generation,
        asOf=as_of,
        first=first,
        last=last,
        items=items,
    )


class Reader:
    """Somebody behind: takes the way that others have found, and reads the log where there is none."""

    def __init__(self, key: str, at: int, matches: Matches) -> None:
        self._key = key
        self._matches = matches
        self.at = at
        self.sent: list[int] = []
        self.read: list[int] = []  # what it had to look at in the log

    def step(self, examined: ExaminedRanges, page: int = 3) -> None:
        if self.at >= LENGTH:
            return
        ahead = examined.relevant_after(self._key, 5, 0, self.at)
        assert ahead is None or ahead.last > self.at, "it always gets on"
        if ahead is not None and ahead.seqs is not None:
            last = min(ahead.last, LENGTH)
            self.sent += [seq for seq in ahead.seqs if seq <= last]
        else:
            last = min(self.at + page, LENGTH if ahead is None else ahead.last)
            looked = range(self.at + 1, last + 1)
            self.read += looked
            self.sent += [seq for seq in looked if self._key in self._matches.get(seq, ())]
        self.at = last


LENGTH = 30
matching = st.dictionaries(
    st.integers(1, LENGTH), st.lists(st.sampled_from(SUBS), unique=True).map(tuple), max_size=LENGTH
)
cuts = st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=8).map(sorted)
# Which batches arrive, in which order, and how often; beyond the last of them somebody reads.
arrivals = st.lists(st.integers(0, 12), max_size=30)
positions = st.fixed_dictionaries({key: st.integers(0, LENGTH) for key in SUBS})


@given(matching, cuts, arrivals, positions)
def test_w40_lost_repeated_and_reordered_batches(
    matches: Matches, cuts: list[int], arrivals: list[int], positions: dict[str, int]
) -> None:
    ends = [*cuts, LENGTH]
    batches = [batch_of(first + 1, last, matches) for first, last in zip([0, *cuts], ends, strict=True)]
    examined = ExaminedRanges(1)
    readers = [Reader(key, at, matches) for key, at in positions.items()]
    for number in arrivals:
        if number < len(batches):
            examined.add_batch(batches[number])
        else:
            readers[number % len(readers)].step(examined)
    for reader, (key, at) in zip(readers, positions.items(), strict=True):
        while reader.at < LENGTH:
            reader.step(examined)
        assert reader.sent == [seq for seq in sorted(matches) if key in matches[seq] and seq > at]


@given(matching, st.lists(st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH)), max_size=12))
def test_w40_overlapping_ranges(matches: Matches, ranges: list[tuple[int, int]]) -> None:
    examined = ExaminedRanges(1)
    extents = [
        examined.add_batch(batch_of(min(one, other), max(one, other), matches)) for one, other in ranges
    ]
    for extent in extents[::3]:
        if extent is not None:
            examined.evict(extent)
    for key in SUBS:
        reader = Reader(key, 0, matches)
        while reader.at < LENGTH:
            reader.step(examined)
        assert reader.sent == [seq for seq in sorted(matches) if key in matches[seq]]


def test_a_hole_is_found_by_the_range_that_was_examined() -> None:
    examined = ExaminedRanges(1)
    assert examined.add_batch(batch_of(8, 12, {9: ("c/1",), 11: ("c/2",)})) is not None
    assert examined.relevant_after("c/1", 5, 0, 4) == RelevantRange(7, None), "nobody has looked at 5 to 7"
    assert examined.relevant_after("c/1", 5, 0, 7) == RelevantRange(12, (9,))
    assert examined.relevant_after("c/1", 5, 0, 9) == RelevantRange(12, ())
    assert examined.relevant_after("c/3", 5, 0, 9) == RelevantRange(12, ()), (
        "nothing matched, but it was looked at"
    )
    assert examined.relevant_after("c/1", 5, 0, 12) is None
    assert examined.relevant_after("c/1", 5, 1, 7) is None, "another partition"
    assert examined.add_batch(batch_of(8, 12, {9: ("c/1",), 11: ("c/2",)})) is None, "once is enough"


def test_who_was_not_known_to_the_job_reads_for_itself() -> None:
    examined = ExaminedRanges(1)
    examined.add_batch(batch_of(1, 9, {3: ("c/1",)}, as_of=6))
    assert examined.relevant_after("c/1", 6, 0, 0) == RelevantRange(9, (3,))
    assert examined.relevant_after("c/1", 7, 0, 0) is None
    examined.add_batch(batch_of(4, 9, {}, as_of=8))
    assert examined.relevant_after("c/1", 7, 0, 0) == RelevantRange(3, None)
    assert examined.relevant_after("c/1", 7, 0, 3) == RelevantRange(9, ())


def test_who_has_lost_the_partition_is_not_heard() -> None:
    examined = ExaminedRanges(1)
    assert examined.add_batch(batch_of(1, 5, {}, epoch=3)) is not None
    assert examined.add_batch(batch_of(6, 9, {7: ("c/1",)}, epoch=2)) is None
    assert examined.add_batch(batch_of(6, 9, {7: ("c/1",)}, generation=2)) is None
    assert examined.add_batch(batch_of(9, 6, {})) is None
    assert examined.add_batch(batch_of(6, 9, {7: ("c/1",)}, epoch=3)) is not None


def test_the_form_on_the_wire() -> None:
    batch = batch_of(1, 5, {3: ("c/1",)})
    raw = encode_delivery(batch)
    assert b'"asOf":9,"from":1,"to":5' in raw
    assert decode_delivery(raw) == batch
    assert decode_delivery(b'{"v":1,"kind":"control","control":"begin"}') is None
