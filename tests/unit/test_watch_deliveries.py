"""Deliveries from outside: whatever becomes of batches on their way, every event is sent once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.watch.deliveries import Batch, Contiguity, Event, Hole, Item, Step, Told, decode, encode

SUBS = ("c/1", "c/2", "c/3")
Matches = dict[int, tuple[str, ...]]  # by number: who is concerned


def batch_of(first: int, last: int, matches: Matches, *, epoch: int = 0, generation: int = 1) -> Batch:
    items = [
        Item(seq, str(seq), "update", [Told(key, "update", "changed") for key in keys], {"id": str(seq)})
        for seq, keys in matches.items()
        if first <= seq <= last and keys
    ]
    return Batch(
        database="d",
        collection="c",
        partition=0,
        owner="m",
        leaseEpoch=epoch,
        generation=generation,
        first=first,
        last=last,
        items=items,
    )


class Gateway:
    """Sends what it is told to, and closes holes by looking at the log itself."""

    def __init__(self, matches: Matches, positions: dict[str, int]) -> None:
        self._matches = matches
        self.check = Contiguity(1)
        self.sent: dict[str, list[int]] = {key: [] for key in positions}
        for key, seq in positions.items():
            self.check.include(key, [seq])

    def do(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Event):
                self.sent[step.key].append(step.item.seq)
                continue
            assert isinstance(step, Hole)
            for seq in range(step.first, step.last + 1):
                for key in set(self._matches.get(seq, ())) & set(step.keys):
                    self.sent[key].append(seq)


LENGTH = 30
matching = st.dictionaries(
    st.integers(1, LENGTH), st.lists(st.sampled_from(SUBS), unique=True).map(tuple), max_size=LENGTH
)
cuts = st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=8).map(sorted)
# Which batches arrive, in which order, and how often: numbers beyond the last are passed over.
arrivals = st.lists(st.integers(0, 9), max_size=25)
positions = st.fixed_dictionaries({key: st.integers(0, LENGTH) for key in SUBS})


@given(matching, cuts, arrivals, positions)
def test_lost_repeated_and_reordered_batches(
    matches: Matches, cuts: list[int], arrivals: list[int], positions: dict[str, int]
) -> None:
    ends = [*cuts, LENGTH]
    batches = [batch_of(first + 1, last, matches) for first, last in zip([0, *cuts], ends, strict=True)]
    gateway = Gateway(matches, positions)
    for number in arrivals:
        if number < len(batches):
            gateway.do(gateway.check.take(batches[number]))
    gateway.do(gateway.check.finish(0, LENGTH))
    for key, sent in gateway.sent.items():
        wanted = [seq for seq in sorted(matches) if key in matches[seq] and seq > positions[key]]
        assert sent == wanted


@given(matching, st.lists(st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH)), max_size=12))
def test_overlapping_ranges(matches: Matches, ranges: list[tuple[int, int]]) -> None:
    gateway = Gateway(matches, dict.fromkeys(SUBS, 0))
    for one, other in ranges:
        gateway.do(gateway.check.take(batch_of(min(one, other), max(one, other), matches)))
    gateway.do(gateway.check.finish(0, LENGTH))
    for key, sent in gateway.sent.items():
        assert sent == [seq for seq in sorted(matches) if key in matches[seq]]


def test_a_hole_is_found_by_the_range_that_was_examined() -> None:
    check = Contiguity(1)
    check.include("c/1", [4])
    check.include("c/2", [9])
    steps = check.take(batch_of(8, 12, {9: ("c/1", "c/2"), 11: ("c/2", "c/3")}))
    assert steps[0] == Hole(("c/1",), 0, 5, 7)
    assert [(step.key, step.item.seq) for step in steps[1:] if isinstance(step, Event)] == [
        ("c/1", 9),
        ("c/2", 11),
    ], "nobody is told again, and who is not known to be matched is not told"
    assert check.reached("c/1") == check.reached("c/2") == [12]
    assert check.take(batch_of(13, 20, {})) == []
    assert check.reached("c/1") == [20], "nothing matched, but it was looked at"


def test_who_has_lost_the_partition_is_not_heard() -> None:
    check = Contiguity(1)
    check.include("c/1", [0])
    check.take(batch_of(1, 5, {}, epoch=3))
    assert check.take(batch_of(6, 9, {7: ("c/1",)}, epoch=2)) == []
    assert check.take(batch_of(6, 9, {7: ("c/1",)}, generation=2)) == []
    assert check.reached("c/1") == [5]
    assert len(check.take(batch_of(6, 9, {7: ("c/1",)}, epoch=3))) == 1


def test_the_form_on_the_wire() -> None:
    batch = batch_of(1, 5, {3: ("c/1",)})
    raw = encode(batch)
    assert b'"from":1,"to":5' in raw
    assert decode(raw) == batch
    assert decode(b'{"v":1,"kind":"control","control":"begin"}') is None
