"""What one sender may do, and what is remembered of it: always bounded, never unfair."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.token_bucket import Rate, TokenBucket, TokenBuckets
from tailrace.hub.deduplication import WAITERS_MAX, SeenMemory, SeenMessage, SeenMessages

SECOND_NS = 1_000_000_000
MILLI_NS = 1_000_000
rates = st.builds(Rate, st.integers(1, 2000), st.integers(1, 50))
pauses_ns = st.lists(st.integers(0, 2 * SECOND_NS), min_size=1, max_size=60)


@given(rates, pauses_ns)
def test_h40_no_window_has_more_than_the_burst_and_the_rate(rate: Rate, pauses: list[int]) -> None:
    bucket = TokenBucket(rate, 0)
    now_ns, taken = 0, list[int]()
    for pause_ns in pauses:
        now_ns += pause_ns // rate.per_s
        if bucket.take(now_ns) == 0:
            taken.append(now_ns)
    for first, start_ns in enumerate(taken):
        for last in range(first, len(taken)):
            window = Fraction(taken[last] - start_ns, SECOND_NS)
            assert last - first + 1 <= rate.burst + rate.per_s * window


@given(rates, pauses_ns)
def test_h40_whoever_stays_below_the_rate_is_never_refused(rate: Rate, pauses: list[int]) -> None:
    bucket = TokenBucket(rate, 0)
    interval_ns = -(-SECOND_NS // rate.per_s)
    now_ns = 0
    for pause_ns in pauses:
        now_ns += interval_ns + pause_ns
        assert bucket.take(now_ns) == 0


@given(rates, st.integers(1, 100), pauses_ns)
def test_the_time_to_wait_is_enough_and_not_too_long(rate: Rate, count: int, pauses: list[int]) -> None:
    bucket = TokenBucket(rate, 0)
    now_ns = 0
    for pause_ns in pauses:
        now_ns += pause_ns // rate.per_s
        wait_ms = bucket.take(now_ns, count)
        if wait_ms:
            if wait_ms > 1:
                assert bucket.take(now_ns + (wait_ms - 1) * MILLI_NS, count) > 0
            now_ns += wait_ms * MILLI_NS
            assert bucket.take(now_ns, count) == 0


def test_more_than_a_bucket_holds_passes_once_and_is_paid_for_later() -> None:
    bucket = TokenBucket(Rate(10, 5), 0)
    assert bucket.take(0, 25) == 0
    assert bucket.take(0) == 2100
    assert bucket.take(2100 * MILLI_NS) == 0
    bucket.give_back(100)
    assert bucket.take(2100 * MILLI_NS, 5) == 0
    assert bucket.take(2100 * MILLI_NS) == 100
    # A clock that is set back gives nothing.
    assert bucket.take(0) == 100


def test_identities_and_kinds_have_buckets_of_their_own() -> None:
    buckets = TokenBuckets({"send": Rate(1, 1), "publish": Rate(1, 1)})
    assert [buckets.take("a", "send", 0), buckets.take("a", "send", 0)] == [0, 1000]
    assert [buckets.take("b", "send", 0), buckets.take("a", "publish", 0)] == [0, 0]
    assert buckets.take("a", "send", 0, rate=Rate(1, 2)) == 0
    buckets.give_back("b", "send")
    assert buckets.take("b", "send", 0) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, SECOND_NS)), max_size=200))
def test_h1_buckets_are_bounded_and_full_ones_leave_first(calls: list[tuple[int, int]]) -> None:
    buckets = TokenBuckets({"send": Rate(10, 2)}, buckets_max=8)
    now_ns = 0
    for identity, pause_ns in calls:
        now_ns += pause_ns
        buckets.take(str(identity), "send", now_ns)
        assert len(buckets) <= 8


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 2 * SECOND_NS)), max_size=60))
def test_h40_two_buckets_asked_together_are_those_asked_one_by_one(
    calls: list[tuple[int, bool, int]],
) -> None:
    kinds = {"send": Rate(3, 2), "bytes": Rate(5, 4)}
    paired, single, crowded = TokenBuckets(kinds), TokenBuckets(kinds), TokenBuckets(kinds, buckets_max=6)
    now_ns = 0
    for number, together, pause_ns in calls:
        now_ns += pause_ns
        identity = str(number)
        alone = [single.take(identity, kind, now_ns) for kind in kinds]
        if together:
            asked = [bucket.take(now_ns) for bucket in paired.pair(identity, "send", "bytes", now_ns)]
        else:
            asked = [paired.take(identity, kind, now_ns) for kind in kinds]
        assert asked == alone
        crowded.pair(identity, "send", "bytes", now_ns)
        assert len(crowded) <= 6


# -- what was seen


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30), st.integers(0, 40)), max_size=80))
def test_h20_a_repeat_is_known_while_it_is_young_and_among_the_newest(
    steps: list[tuple[int, int, int]],
) -> None:
    seen = SeenMessages(entries_max=6, ttl_ms=50)
    now_ms, model = 0, dict[str, tuple[int, int]]()
    evicted = -1
    for number, pause_ms, timestamp_ms in steps:
        now_ms += pause_ms
        identifier = str(number)
        model = {name: times for name, times in model.items() if now_ms - times[0] < 50}
        found = seen.get(identifier, now_ms)
        seen.expire(now_ms)
        assert (found is not None) == (identifier in model)
        if found is None:
            seen.add(identifier, now_ms, timestamp_ms, answers=(b"ack",))
            model[identifier] = (now_ms, timestamp_ms)
            if len(model) > 6:
                eldest = next(iter(model))
                evicted = max(evicted, model.pop(eldest)[1])
        assert len(seen) == len(model)
        assert seen.floor_ms == evicted


def test_h20_a_repeat_gets_the_answers_of_the_first() -> None:
    seen = SeenMessages()
    entry = seen.add("1", 0, 0)
    assert seen.get("1", 1) is entry
    assert seen.add_waiter(entry, "session a")
    assert seen.add_waiter(entry, "session a")
    assert seen.answer(entry, b"accepted", final=False) == ("session a",)
    assert seen.answer(entry, b"processed") == ("session a",)
    assert (entry.finished, entry.answers, entry.waiters) == (True, (b"accepted", b"processed"), ())
    seen.forget("1")
    assert seen.get("1", 1) is None
    assert (len(seen), seen.size_bytes) == (0, 0)


def test_h20_answers_are_bounded_in_bytes_and_their_messages_stay_known() -> None:
    seen = SeenMessages(answer_bytes_max=10_000)
    entries: list[SeenMessage] = []
    for number in range(100):
        entry = seen.add(str(number), 0, number)
        seen.answer(entry, b"x" * 1000)
        entries.append(entry)
        assert seen.answer_bytes <= 10_000
    assert [seen.get(str(number), 0) for number in range(100)] == entries
    assert [entry.answers_dropped for entry in entries] == [True] * 90 + [False] * 10
    assert seen.floor_ms == -1
    unfinished = seen.add("u", 0, 0)
    assert [seen.add_waiter(unfinished, number) for number in range(WAITERS_MAX + 1)] == [
        True
    ] * WAITERS_MAX + [False]
    for _ in range(50):  # an answer in many parts is no way around it
        assert len(seen.answer(unfinished, b"x" * 1000, final=False)) == WAITERS_MAX
        assert seen.answer_bytes <= 10_000
    assert (unfinished.answers, unfinished.answers_dropped) == ((), True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["note", "add", "answer", "forget", "expire"]),
            st.integers(0, 2),
            st.integers(0, 9),
            st.integers(0, 1500),
        ),
        max_size=120,
    )
)
def test_what_all_remember_together_is_counted_to_the_byte(steps: list[tuple[str, int, int, int]]) -> None:
    memory = SeenMemory(8000)
    sets = [SeenMessages(entries_max=6, answer_bytes_max=1200, ttl_ms=50, memory=memory) for _ in range(3)]
    now_ms = 0
    for what, number, name, size in steps:
        seen, identifier = sets[number], str(name)
        entry = seen.get(identifier, now_ms)
        if what == "note":
            before = memory.bytes
            assert not seen.add_bare(identifier, now_ms) or before < 8000
        elif what == "add" and entry is None and not memory.is_full:
            seen.add(identifier, now_ms, 0)
        elif what == "answer" and entry is not None and not entry.finished:
            seen.answer(entry, b"x" * size)
        elif what == "forget":
            seen.forget(identifier)
        elif what == "expire":
            now_ms += size % 40
            seen.expire(now_ms)
        assert memory.bytes == sum(each.size_bytes for each in sets)
        assert memory.answer_bytes == sum(each.answer_bytes for each in sets) <= 2000
        # One that is let in may be the last to go beyond it.
        assert memory.bytes <= 8000 + 2000 + 600
    for seen in sets:
        seen.expire(now_ms + 50)
    assert (memory.bytes, memory.answer_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=80))
def test_h20_a_message_without_an_answer_is_remembered_as_long_as_one_with(
    steps: list[tuple[int, int, bool]],
) -> None:
    noted, added = SeenMessages(entries_max=5, ttl_ms=50), SeenMessages(entries_max=5, ttl_ms=50)
    now_ms = 0
    for number, pause_ms, has_answer in steps:
        now_ms += pause_ms
        identifier = str(number)
        known = noted.get(identifier, now_ms)
        assert (known is None) == (added.get(identifier, now_ms) is None)
        if known is not None:
            assert known.finished
            continue
        if has_answer or not noted.add_bare(identifier, now_ms):
            noted.add(identifier, now_ms, 0, answers=(b"ack",))
        added.add(identifier, now_ms, 0, answers=(b"ack",))
        assert len(noted) == len(added)
    noted.expire(now_ms + 50)
    assert (len(noted), noted.size_bytes) == (0, 0)
