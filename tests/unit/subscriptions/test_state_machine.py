from __future__ import annotations

import pytest

from tailrace.common.errors import TailraceError
from tailrace.protocol.offsets import START_OFFSET, encode_offset
from tailrace.subscriptions import state_machine
from tailrace.subscriptions.model import (
    BEFORE_FIRST,
    StreamLink,
    Subscription,
    SubscriptionConfig,
    SubscriptionHead,
    Wake,
    decode_subscriptions,
    encode_changes,
    first_cursor,
)
from tailrace.subscriptions.state_machine import Step, StreamAck, WakeAnswer

NOW_MS = 1_767_225_600_000
TTL_MS = 1000
T0, T1, T2, T3 = (encode_offset(0, entry) for entry in range(4))


def config(
    kind: str = "webhook", pattern: str | None = "events/*", streams: tuple[str, ...] = ()
) -> SubscriptionConfig:
    webhook = kind == "webhook"
    return SubscriptionConfig(
        type="webhook" if webhook else "pull-wake",
        pattern=pattern,
        streams=streams,
        webhook_url="https://w.example/" if webhook else None,
        wake_stream=None if webhook else "events/wake",
        lease_ttl_ms=TTL_MS,
        description=None,
    )


def apply(sub: Subscription, step: Step) -> Wake | None:
    for change in step.changes:
        sub.apply(change)
    return step.wake


def subscription(setup: SubscriptionConfig, existing: dict[str, str | None] | None = None) -> Subscription:
    sub = Subscription("s1", SubscriptionHead(setup, NOW_MS, 0))
    apply(sub, state_machine.create(sub, (existing or {}).items()))
    return sub


def woken(setup: SubscriptionConfig) -> tuple[Subscription, Wake]:
    """A subscription with one stream, one new entry, and the wake for it."""
    sub = subscription(setup, {"events/a": T0})
    sub.observe("events/a", T1)
    wake = apply(sub, state_machine.next_wake(sub, NOW_MS, "w_1"))
    assert wake is not None
    return sub, wake


def answer_for(wake: Wake, *acks: tuple[str, str], done: bool = False) -> WakeAnswer:
    return WakeAnswer(wake.generation, wake.generation, wake.id, [StreamAck(*ack) for ack in acks], done)


def code_of(decision: object, *arguments: object) -> str:
    assert callable(decision)
    with pytest.raises(TailraceError) as caught:
        decision(*arguments)
    return caught.value.code


# -- links ------------------------------------------------------------------------------------------------


def test_existing_streams_are_linked_at_their_tail() -> None:
    sub = subscription(
        config(streams=("other", "missing", "events/b", "__registry__")),
        {"events/a": T2, "events/b": T1, "other": T3, "missing": None, "__registry__": T1},
    )
    assert sub.links == {
        "events/a": StreamLink(T2, explicit=False, glob=True),
        "events/b": StreamLink(T1, explicit=True, glob=True),
        "other": StreamLink(T3, explicit=True, glob=False),
        "missing": StreamLink(BEFORE_FIRST, explicit=True, glob=False),
        "__registry__": StreamLink(T1, explicit=True, glob=False),
    }
    assert sub.links["events/b"].kind == "explicit"
    assert state_machine.next_wake(sub, NOW_MS, "w") == Step()


def test_the_wake_stream_is_never_linked() -> None:
    sub = subscription(config("pull", streams=("events/wake",)), {"events/wake": T1, "events/a": T1})
    assert list(sub.links) == ["events/a"]
    assert state_machine.stream_created(sub, "events/wake", T0) == Step()
    assert state_machine.add_streams(sub, {"events/wake": T1}) == Step()


def test_a_stream_created_later_is_linked_before_its_content() -> None:
    sub = subscription(config())
    apply(sub, state_machine.stream_created(sub, "events/a", first_cursor(T0, empty=True)))
    sub.observe("events/a", T0)
    assert sub.links["events/a"] == StreamLink(T0, explicit=False, glob=True)
    assert not sub.pending
    apply(sub, state_machine.stream_created(sub, "events/b", first_cursor(T2, empty=False)))
    sub.observe("events/b", T2)
    assert sub.links["events/b"].acked == START_OFFSET
    assert sub.pending == {"events/b": T2}
    assert state_machine.stream_created(sub, "other", T0) == Step()
    # Told twice, nothing moves.
    assert state_machine.stream_created(sub, "events/b", START_OFFSET) == Step()


def test_a_named_stream_that_comes_later_keeps_its_name() -> None:
    sub = subscription(config(pattern=None, streams=("manual/a",)), {"manual/a": None})
    assert sub.links["manual/a"].acked == BEFORE_FIRST
    apply(sub, state_machine.stream_created(sub, "manual/a", T0))
    sub.observe("manual/a", T1)
    assert sub.links["manual/a"] == StreamLink(T0, explicit=True, glob=False)
    assert sub.pending == {"manual/a": T1}


def test_adding_and_removing_streams() -> None:
    sub = subscription(config(), {"events/a": T1})
    apply(sub, state_machine.add_streams(sub, {"events/a": T3, "manual/b": T2, "manual/c": None}))
    assert sub.links["events/a"] == StreamLink(T1, explicit=True, glob=True)
    assert sub.links["manual/b"] == StreamLink(T2, explicit=True, glob=False)
    assert sub.links["manual/c"].acked == BEFORE_FIRST
    assert state_machine.add_streams(sub, {"manual/b": T3}) == Step()
    for path in ("events/a", "manual/b", "manual/c", "unknown"):
        apply(sub, state_machine.remove_stream(sub, path))
    assert sub.links == {"events/a": StreamLink(T1, explicit=False, glob=True)}
    assert state_machine.remove_stream(sub, "events/a") == Step()


def test_a_deleted_stream_leaves_or_waits() -> None:
    sub = subscription(config(streams=("manual/a",)), {"events/a": T1, "manual/a": T1})
    sub.observe("events/a", T2)
    sub.observe("manual/a", T2)
    for path in ("events/a", "manual/a", "unknown"):
        apply(sub, state_machine.stream_deleted(sub, path))
        sub.observe(path, None)
    assert sub.links == {"manual/a": StreamLink(BEFORE_FIRST, explicit=True, glob=False)}
    assert not sub.pending
    again = encode_offset(1, 0)
    apply(sub, state_machine.stream_created(sub, "manual/a", again))
    sub.observe("manual/a", again)
    assert not sub.pending


def test_deleting_keeps_the_generation() -> None:
    sub, wake = woken(config())
    apply(sub, state_machine.delete(sub, NOW_MS + 5))
    assert sub.deleted
    assert sub.head == SubscriptionHead(None, NOW_MS, wake.generation, None, NOW_MS + 5)
    assert sub.links == {}
    assert sub.pending == {}


# -- wakes ------------------------------------------------------------------------------------------------


def test_pending_work_wakes_once() -> None:
    sub, wake = woken(config())
    assert wake.generation == 1
    assert wake.tails == {"events/a": T1}
    assert wake.lease_until_ms == NOW_MS + TTL_MS
    sub.observe("events/a", T2)
    assert state_machine.next_wake(sub, NOW_MS, "w_2") == Step()


def test_a_wake_covers_a_bounded_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "WAKE_STREAMS_MAX", 2)
    sub = subscription(config(), {f"events/{name}": T0 for name in "abc"})
    for name in "cab":
        sub.observe(f"events/{name}", T1)
    wake = apply(sub, state_machine.next_wake(sub, NOW_MS, "w_1"))
    assert wake is not None
    assert list(wake.tails) == ["events/c", "events/a"]
    following = apply(sub, state_machine.delivery_succeeded(sub, 1, done=True, now_ms=NOW_MS, wake_id="w_2"))
    assert following is not None
    assert following.tails == {"events/b": T1}


def test_done_in_the_response_acks_the_snapshot() -> None:
    sub, wake = woken(config())
    sub.observe("events/a", T2)
    following = apply(
        sub, state_machine.delivery_succeeded(sub, wake.generation, done=True, now_ms=NOW_MS, wake_id="w_2")
    )
    assert sub.links["events/a"].acked == T1
    assert following is not None
    assert following.generation == 2
    assert following.tails == {"events/a": T2}
    last = apply(sub, state_machine.delivery_succeeded(sub, 2, done=True, now_ms=NOW_MS, wake_id="w_3"))
    assert last is None
    assert sub.wake is None
    assert sub.links["events/a"].acked == T2


def test_a_snapshot_never_moves_a_cursor_back() -> None:
    sub, wake = woken(config())
    sub.observe("events/a", T3)
    apply(sub, state_machine.apply_answer(sub, answer_for(wake, ("events/a", T2)), NOW_MS, "w_2"))
    apply(sub, state_machine.delivery_succeeded(sub, 1, done=True, now_ms=NOW_MS, wake_id="w_3"))
    assert sub.links["events/a"].acked == T2
    sub2, _ = woken(config())
    apply(sub2, state_machine.stream_deleted(sub2, "events/a"))
    apply(sub2, state_machine.delivery_succeeded(sub2, 1, done=True, now_ms=NOW_MS, wake_id="w_2"))
    assert sub2.links == {}


def test_callback_moves_cursors_and_ends_the_wake() -> None:
    sub, wake = woken(config())
    apply(sub, state_machine.delivery_succeeded(sub, 1, done=False, now_ms=NOW_MS, wake_id="w_x"))
    step = state_machine.apply_answer(sub, answer_for(wake, ("events/a", T1), done=True), NOW_MS, "w_2")
    assert apply(sub, step) is None
    assert sub.wake is None
    assert sub.links["events/a"].acked == T1
    assert code_of(state_machine.apply_answer, sub, answer_for(wake, done=True), NOW_MS, "w_3") == "FENCED"


def test_an_answer_without_done_extends_the_lease() -> None:
    sub, wake = woken(config())
    apply(sub, state_machine.delivery_succeeded(sub, 1, done=False, now_ms=NOW_MS, wake_id="w_x"))
    apply(sub, state_machine.apply_answer(sub, answer_for(wake), NOW_MS + 900, "w_2"))
    assert sub.wake is not None
    assert sub.wake.lease_until_ms == NOW_MS + 900 + TTL_MS
    assert state_machine.due_at_ms(sub) == NOW_MS + 900 + TTL_MS
    assert state_machine.next_wake(sub, NOW_MS + 900 + TTL_MS - 1, "w_2") == Step()


@pytest.mark.parametrize("kind", ["webhook", "pull"])
def test_fencing(kind: str) -> None:
    sub, wake = woken(config(kind))
    if kind == "pull":
        # Offered, not claimed: nobody can have a right to answer it yet.
        assert code_of(state_machine.apply_answer, sub, answer_for(wake), NOW_MS, "w_2") == "FENCED"
        claimed = apply(sub, state_machine.claim(sub, "worker", NOW_MS, "w_2"))
        assert claimed is not None
        assert (claimed.id, claimed.generation) == (wake.id, wake.generation)
    stale = [
        WakeAnswer(0, 1, "w_1"),
        WakeAnswer(1, 0, "w_1"),
        WakeAnswer(1, 2, "w_1"),
        WakeAnswer(2, 1, "w_1"),
        WakeAnswer(1, 1, "w_2"),
    ]
    for given in stale:
        assert code_of(state_machine.apply_answer, sub, given, NOW_MS, "w_3") == "FENCED"
        assert code_of(state_machine.release, sub, given, NOW_MS, "w_3") == "FENCED"
    assert state_machine.apply_answer(sub, WakeAnswer(1, 1, "w_1"), NOW_MS, "w_3").changes


def test_acks_are_all_checked_before_any_is_applied() -> None:
    sub = subscription(config(), {"events/a": T1, "events/b": T1})
    sub.observe("events/a", T2)
    wake = apply(sub, state_machine.next_wake(sub, NOW_MS, "w_1"))
    assert wake is not None
    good = ("events/a", T2)
    for bad in (
        ("events/c", T1),
        ("events/a", T0),
        ("events/a", T3),
        ("events/b", T2),
        ("events/b", T0),
        ("events/a", BEFORE_FIRST),
        ("events/a", ""),
    ):
        assert (
            code_of(state_machine.apply_answer, sub, answer_for(wake, good, bad), NOW_MS, "w")
            == "INVALID_OFFSET"
        )
    assert sub.links["events/a"].acked == T1
    step = state_machine.apply_answer(
        sub, answer_for(wake, good, ("events/a", T1), ("events/b", T1)), NOW_MS, "w"
    )
    apply(sub, step)
    assert sub.links["events/a"].acked == T2
    assert not sub.pending


def test_nothing_of_a_missing_stream_can_be_acked() -> None:
    sub = subscription(config(streams=("missing",)), {"events/a": T0, "missing": None})
    sub.observe("events/a", T1)
    wake = apply(sub, state_machine.next_wake(sub, NOW_MS, "w_1"))
    assert wake is not None
    for offset in (BEFORE_FIRST, T0, T1):
        given = answer_for(wake, ("missing", offset))
        assert code_of(state_machine.apply_answer, sub, given, NOW_MS, "w") == "INVALID_OFFSET"


def test_when_a_lease_runs_out_a_new_wake_follows() -> None:
    sub, wake = woken(config())
    apply(sub, state_machine.delivery_succeeded(sub, 1, done=False, now_ms=NOW_MS, wake_id="w_x"))
    late_ms = NOW_MS + TTL_MS
    # Over even before the timer says so.
    assert code_of(state_machine.apply_answer, sub, answer_for(wake), late_ms, "w_2") == "FENCED"
    following = apply(sub, state_machine.next_wake(sub, late_ms, "w_2"))
    assert following is not None
    assert (following.id, following.generation) == ("w_2", 2)
    apply(sub, state_machine.delivery_succeeded(sub, 2, done=False, now_ms=late_ms, wake_id="w_x"))
    apply(sub, state_machine.stream_deleted(sub, "events/a"))
    step = state_machine.next_wake(sub, late_ms + TTL_MS, "w_3")
    assert apply(sub, step) is None
    assert sub.wake is None
    assert sub.head.generation == 2
    assert state_machine.due_at_ms(sub) is None


def test_a_lease_does_not_run_out_while_the_hook_is_answering() -> None:
    sub, wake = woken(config())
    sub.delivering = wake.generation
    assert state_machine.due_at_ms(sub) is None
    assert state_machine.next_wake(sub, NOW_MS + 10 * TTL_MS, "w_2") == Step()
    given = answer_for(wake, ("events/a", T1), done=True)
    assert state_machine.apply_answer(sub, given, NOW_MS + 10 * TTL_MS, "w_2").changes


# -- retries ----------------------------------------------------------------------------------------------


def test_the_retry_schedule() -> None:
    pauses = [state_machine.retry_delay_ms(failures, 0) for failures in range(1, 10)]
    assert pauses == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000, 60_000]
    assert state_machine.retry_delay_ms(1, -1) == 800
    assert state_machine.retry_delay_ms(1, 1) == 1200
    assert state_machine.retry_delay_ms(10**6, 1) == 72_000


def test_a_failed_delivery_is_tried_again_with_the_same_wake() -> None:
    sub, wake = woken(config())
    assert state_machine.due_at_ms(sub) == NOW_MS
    apply(sub, state_machine.delivery_failed(sub, 1, NOW_MS, 0))
    assert sub.wake is not None
    assert sub.wake.failures == 1
    assert state_machine.due_at_ms(sub) == NOW_MS + 1000
    # The lease was over meanwhile, but the retry is what comes next.
    assert state_machine.next_wake(sub, NOW_MS + 1000, "w_2") == Step()
    assert state_machine.begin_attempt(sub, NOW_MS + 999) == Step()
    again = apply(sub, state_machine.begin_attempt(sub, NOW_MS + 1000))
    assert again is not None
    assert (again.id, again.generation, again.tails) == (wake.id, wake.generation, wake.tails)
    assert again.lease_until_ms == NOW_MS + 1000 + TTL_MS
    sub.delivering = 1
    assert state_machine.begin_attempt(sub, NOW_MS + 1000) == Step()
    sub.delivering = None
    apply(sub, state_machine.delivery_failed(sub, 1, NOW_MS + 1000, 0))
    assert state_machine.due_at_ms(sub) == NOW_MS + 3000
    apply(sub, state_machine.delivery_succeeded(sub, 1, done=False, now_ms=NOW_MS + 3000, wake_id="w_x"))
    assert sub.wake.attempt_at_ms is None
    assert sub.wake.failures == 0


def test_a_worker_that_calls_back_after_all_stops_the_retries() -> None:
    sub, wake = woken(config())
    apply(sub, state_machine.delivery_failed(sub, 1, NOW_MS, 0))
    apply(sub, state_machine.apply_answer(sub, answer_for(wake), NOW_MS + 500, "w_2"))
    assert sub.wake is not None
    assert sub.wake.attempt_at_ms is None
    assert state_machine.due_at_ms(sub) == NOW_MS + 500 + TTL_MS


def test_the_outcome_of_an_old_delivery_changes_nothing() -> None:
    sub, wake = woken(config())
    apply(sub, state_machine.apply_answer(sub, answer_for(wake, done=True), NOW_MS, "w_2"))
    assert sub.head.generation == 2
    assert state_machine.delivery_succeeded(sub, 1, done=True, now_ms=NOW_MS, wake_id="w_3") == Step()
    assert state_machine.delivery_failed(sub, 1, NOW_MS, 0) == Step()


# -- pull-wake --------------------------------------------------------------------------------------------


def test_claim_ack_release() -> None:
    sub, wake = woken(config("pull"))
    assert wake.lease_until_ms is None
    assert wake.attempt_at_ms is None
    assert state_machine.due_at_ms(sub) is None
    sub.observe("events/a", T2)
    claimed = apply(sub, state_machine.claim(sub, "worker-1", NOW_MS, "w_x"))
    assert claimed is not None
    assert claimed.tails == {"events/a": T2}
    assert claimed.lease_until_ms == NOW_MS + TTL_MS
    with pytest.raises(TailraceError) as caught:
        state_machine.claim(sub, "worker-2", NOW_MS, "w_x")
    assert caught.value.code == "ALREADY_CLAIMED"
    assert caught.value.extra == {"current_holder": "worker-1", "generation": 1}
    step = state_machine.apply_answer(sub, answer_for(claimed, ("events/a", T1), done=True), NOW_MS, "w_2")
    following = apply(sub, step)
    assert following is not None
    assert following.holder is None
    claimed = apply(sub, state_machine.claim(sub, "worker-2", NOW_MS, "w_x"))
    assert claimed is not None
    released = apply(sub, state_machine.release(sub, answer_for(claimed), NOW_MS, "w_3"))
    assert released is not None
    assert released.generation == 3
    assert sub.links["events/a"].acked == T1


def test_a_claim_right_after_an_append_needs_no_wake() -> None:
    sub = subscription(config("pull"), {"events/a": T0})
    assert code_of(state_machine.claim, sub, "worker", NOW_MS, "w_1") == "NO_PENDING_WORK"
    sub.observe("events/a", T1)
    claimed = apply(sub, state_machine.claim(sub, "worker", NOW_MS, "w_1"))
    assert claimed is not None
    assert (claimed.id, claimed.generation, claimed.holder) == ("w_1", 1, "worker")
    apply(
        sub, state_machine.apply_answer(sub, answer_for(claimed, ("events/a", T1), done=True), NOW_MS, "w_2")
    )
    assert code_of(state_machine.claim, sub, "worker", NOW_MS, "w_3") == "NO_PENDING_WORK"


def test_a_claim_after_the_lease_takes_over() -> None:
    sub, _ = woken(config("pull"))
    first = apply(sub, state_machine.claim(sub, "worker-1", NOW_MS, "w_x"))
    assert first is not None
    second = apply(sub, state_machine.claim(sub, "worker-2", NOW_MS + TTL_MS, "w_2"))
    assert second is not None
    assert (second.holder, second.generation) == ("worker-2", 2)
    assert code_of(state_machine.apply_answer, sub, answer_for(first), NOW_MS + TTL_MS, "w_3") == "FENCED"


def test_a_lease_ends_although_the_clock_was_set_back() -> None:
    sub, _ = woken(config("pull"))
    apply(sub, state_machine.claim(sub, "worker-1", NOW_MS, "w_x"))
    day_ms = 86_400_000
    for step_ms in (1, TTL_MS):
        assert code_of(state_machine.claim, sub, "worker-2", NOW_MS - step_ms, "w_2") == "ALREADY_CLAIMED"
        assert state_machine.due_in_ms(sub, NOW_MS - step_ms) == TTL_MS + step_ms
    assert state_machine.due_in_ms(sub, NOW_MS - day_ms) == 0
    second = apply(sub, state_machine.claim(sub, "worker-2", NOW_MS - day_ms, "w_2"))
    assert second is not None
    assert second.lease_until_ms == NOW_MS - day_ms + TTL_MS


def test_a_delivery_is_tried_again_although_the_clock_was_set_back() -> None:
    sub, wake = woken(config())
    apply(sub, state_machine.delivery_failed(sub, wake.generation, NOW_MS, 0.0))
    assert state_machine.begin_attempt(sub, NOW_MS - 1) == Step()
    assert state_machine.due_in_ms(sub, NOW_MS - 86_400_000) == 0
    assert apply(sub, state_machine.begin_attempt(sub, NOW_MS - 86_400_000)) is not None


# -- on disk ----------------------------------------------------------------------------------------------


def test_state_survives_saving() -> None:
    setup = config("pull", streams=("x/y/z",))
    sub = Subscription("s1", SubscriptionHead(setup, NOW_MS, 5))
    step = state_machine.create(sub, [("events/a", T0), ("x/y/z", None)])
    disk = dict(encode_changes("s1", step.changes))
    assert list(disk)[-1] == "subscription/s1"
    apply(sub, step)
    sub.observe("events/a", T1)
    step = state_machine.claim(sub, "worker", NOW_MS, "w_1")
    disk.update(encode_changes("s1", step.changes))
    apply(sub, step)
    records = [(key, value) for key, value in disk.items() if value is not None]
    again, orphans = decode_subscriptions([("other", b"\xff"), *reversed(records)])
    assert set(again) == {"s1"}
    assert orphans == []
    assert again["s1"].head == sub.head
    assert again["s1"].links == sub.links
    deletion = encode_changes("s1", state_machine.delete(sub, NOW_MS).changes)
    assert deletion[0][0] == "subscription/s1"
    disk.update(deletion)
    records = [(key, value) for key, value in disk.items() if value is not None]
    assert [key for key, _ in records] == ["subscription/s1"]
    assert decode_subscriptions(records)[0]["s1"].deleted


def test_links_that_belong_to_nothing_are_found() -> None:
    sub = subscription(config(), {"events/a": T0, "events/b/c": T0})
    records = encode_changes("s1", state_machine.create(sub, [("events/a", T0)]).changes)
    half_made = [(key, value) for key, value in records[:-1] if value is not None]
    assert decode_subscriptions(half_made) == ({}, ["subscription-link/s1/events/a"])
    records[-1] = encode_changes("s1", state_machine.delete(sub, NOW_MS).changes)[0]
    found, orphans = decode_subscriptions([(key, value) for key, value in records if value is not None])
    assert found["s1"].deleted
    assert found["s1"].links == {}
    assert orphans == ["subscription-link/s1/events/a"]


def test_confirming_moves_callbacks_only() -> None:
    sub = subscription(config())
    apply(sub, state_machine.confirm(sub, "http://a.example"))
    assert sub.head.base_url == "http://a.example"
    assert state_machine.confirm(sub, "http://a.example") == Step()
