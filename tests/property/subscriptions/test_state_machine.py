"""Any sequence of events keeps a subscription's promises: nothing lost, nothing moved back, one wake."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from tailrace.common.errors import TailraceError
from tailrace.protocol.offsets import encode_offset
from tailrace.subscriptions import state_machine
from tailrace.subscriptions.model import (
    BEFORE_FIRST,
    Subscription,
    SubscriptionConfig,
    SubscriptionHead,
    Wake,
    decode_subscriptions,
    encode_changes,
    first_cursor,
)
from tailrace.subscriptions.state_machine import Step, StreamAck, WakeAnswer

NAMES = ["events/a", "events/b", "events/c/d", "manual/x", "other"]
TTL_MS = 1000

names = st.sampled_from(NAMES)


class Log:
    """The streams as the log has them: epoch and number of entries."""

    def __init__(self) -> None:
        self.streams: dict[str, tuple[int, int]] = {}
        self.epochs: dict[str, int] = {}

    def tail(self, name: str) -> str | None:
        position = self.streams.get(name)
        return None if position is None else encode_offset(*position)


class SubscriptionStates(RuleBasedStateMachine):
    wakes = Bundle("wakes")

    @initialize(webhook=st.booleans(), named=st.booleans(), existing=st.sets(names))
    def begin(self, webhook: bool, named: bool, existing: set[str]) -> None:
        self.now_ms = 1_767_225_600_000
        self.log = Log()
        for name in existing:
            self.log.streams[name] = (0, 2)
            self.log.epochs[name] = 0
        config = SubscriptionConfig(
            type="webhook" if webhook else "pull-wake",
            pattern="events/**",
            streams=("events/a", "manual/x") if named else (),
            webhook_url="https://w.example/" if webhook else None,
            wake_stream=None if webhook else "wake",
            lease_ttl_ms=TTL_MS,
            description=None,
        )
        found = {name: self.log.tail(name) for name in {*existing, *config.streams}}
        self.disk: dict[str, bytes | None] = {}
        self.sub = Subscription("s1", SubscriptionHead(config, self.now_ms, 0))
        step = state_machine.create(self.sub, found.items())
        self.webhook = webhook
        self.numbers = 0
        self.issued: dict[int, str] = {}
        self.cursors: dict[str, str] = {}
        self.commit(step)

    # -- what the service does around the decisions ---------------------------------------------------------

    def wake_id(self) -> str:
        self.numbers += 1
        return f"w_{self.numbers}"

    def commit(self, step: Step) -> Wake | None:
        self.disk.update(encode_changes("s1", step.changes))
        for change in step.changes:
            self.sub.apply(change)
        self.observe_all()
        wake = self.sub.wake
        if wake is not None:
            assert self.issued.setdefault(wake.generation, wake.id) == wake.id, "one wake per generation"
        return step.wake

    def observe_all(self) -> None:
        for path in list(self.sub.links):
            self.sub.observe(path, self.log.tail(path))

    def settle(self) -> None:
        """The loop's own work after every event: wakes that are due are issued."""
        self.observe_all()
        self.commit(state_machine.next_wake(self.sub, self.now_ms, self.wake_id()))

    # -- the log moves --------------------------------------------------------------------------------------

    @rule(name=names, count=st.integers(0, 2))
    def create(self, name: str, count: int) -> None:
        if name in self.log.streams:
            return
        epoch = self.log.epochs.get(name, -1) + 1
        self.log.epochs[name] = epoch
        self.log.streams[name] = (epoch, count)
        cursor = first_cursor(encode_offset(epoch, count), empty=count == 0)
        self.commit(state_machine.stream_created(self.sub, name, cursor))
        self.settle()

    @rule(name=names)
    def append(self, name: str) -> None:
        if name in self.log.streams:
            epoch, entries = self.log.streams[name]
            self.log.streams[name] = (epoch, entries + 1)
            self.settle()

    @rule(name=names)
    def delete(self, name: str) -> None:
        if self.log.streams.pop(name, None) is not None:
            self.cursors.pop(name, None)
            self.commit(state_machine.stream_deleted(self.sub, name))
            self.settle()

    @rule(name=names, add=st.booleans())
    def link(self, name: str, add: bool) -> None:
        if add:
            self.commit(state_machine.add_streams(self.sub, {name: self.log.tail(name)}))
        else:
            self.commit(state_machine.remove_stream(self.sub, name))
            if name not in self.sub.links:
                self.cursors.pop(name, None)
        self.settle()

    # -- workers --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.webhook and self.sub.wake is not None)
    @rule(target=wakes)
    def receive(self) -> Wake:
        assert self.sub.wake is not None
        return self.sub.wake

    @precondition(lambda self: not self.webhook)
    @rule(target=wakes, worker=st.sampled_from(["one", "two"]))
    def claim(self, worker: str) -> Wake:
        holder = state_machine.current_wake(self.sub, self.now_ms)
        try:
            wake = self.commit(state_machine.claim(self.sub, worker, self.now_ms, self.wake_id()))
        except TailraceError as error:
            if error.code == "ALREADY_CLAIMED":
                assert holder is not None
                assert holder.holder is not None
                return holder
            code = error.code
            assert code == "NO_PENDING_WORK"
            assert not self.sub.pending
            return Wake("none", 0, {})
        assert wake is not None
        assert wake.holder == worker
        assert wake.tails
        return wake

    @precondition(lambda self: self.sub.wake is not None)
    @rule(data=st.data(), done=st.booleans())
    def answer_now(self, data: st.DataObject, done: bool) -> None:
        assert self.sub.wake is not None
        self.answer(self.sub.wake, data, done)

    @rule(wake=wakes, data=st.data(), done=st.booleans())
    def answer_then(self, wake: Wake, data: st.DataObject, done: bool) -> None:
        self.answer(wake, data, done)

    def answer(self, wake: Wake, data: st.DataObject, done: bool) -> None:
        acks: list[StreamAck] = []
        for path in data.draw(st.lists(st.sampled_from(NAMES), max_size=3)):
            tail = self.log.tail(path)
            offsets = [tail or BEFORE_FIRST, encode_offset(0, data.draw(st.integers(0, 4)))]
            acks.append(StreamAck(path, data.draw(st.sampled_from(offsets))))
        self.respond(WakeAnswer(wake.generation, wake.generation, wake.id, acks, done), release=False)

    @precondition(lambda self: not self.webhook)
    @rule(wake=consumes(wakes))
    def release(self, wake: Wake) -> None:
        self.respond(WakeAnswer(wake.generation, wake.generation, wake.id), release=True)

    @rule(token=st.integers(0, 3), body=st.integers(0, 3), wake=wakes)
    def forge(self, token: int, body: int, wake: Wake) -> None:
        self.respond(WakeAnswer(token, body, wake.id, [], True), release=False)

    def respond(self, given: WakeAnswer, *, release: bool) -> None:
        before = (self.sub.head, dict(self.sub.links))
        current = state_machine.current_wake(self.sub, self.now_ms)
        decide = state_machine.release if release else state_machine.apply_answer
        try:
            step = decide(self.sub, given, self.now_ms, self.wake_id())
        except TailraceError as error:
            code = error.code
            assert code in ("FENCED", "INVALID_OFFSET")
            assert (self.sub.head, self.sub.links) == before
            return
        assert current is not None
        assert {given.token_generation, given.generation} == {current.generation}
        assert given.wake_id == current.id
        following = self.commit(step)
        if given.done or release:
            assert (following is not None) == bool(self.sub.pending)
            assert self.sub.wake == following
        for ack in given.acks:
            assert self.sub.links[ack.stream].acked >= ack.offset
        self.settle()

    # -- webhooks -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.webhook)
    @rule(outcome=st.sampled_from(["done", "accepted", "failed"]), old=st.integers(0, 1))
    def deliver(self, outcome: str, old: int) -> None:
        generation = self.sub.head.generation - old
        if outcome == "failed":
            step = state_machine.delivery_failed(self.sub, generation, self.now_ms, 0.5)
        else:
            step = state_machine.delivery_succeeded(
                self.sub, generation, done=outcome == "done", now_ms=self.now_ms, wake_id=self.wake_id()
            )
        self.commit(step)
        self.settle()

    # -- time and power -------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 400, TTL_MS, 5 * TTL_MS]))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.settle()
        self.commit(state_machine.begin_attempt(self.sub, self.now_ms))

    @rule()
    def restart(self) -> None:
        records = [(key, value) for key, value in self.disk.items() if value is not None]
        again = decode_subscriptions(records)[0]["s1"]
        assert again.head == self.sub.head
        assert again.links == self.sub.links
        self.sub = again
        self.settle()

    # -- promises -------------------------------------------------------------------------------------------

    @invariant()
    def pending_work_is_never_forgotten(self) -> None:
        expected = {path for path, link in self.sub.links.items() if (self.log.tail(path) or "") > link.acked}
        assert set(self.sub.pending) == expected
        if expected:
            assert self.sub.wake is not None
        due_ms = state_machine.due_at_ms(self.sub)
        if self.webhook and self.sub.wake is not None:
            assert due_ms is not None, "a webhook's wake always ends by itself"
        if not self.webhook and self.sub.wake is not None:
            assert (due_ms is None) == (self.sub.wake.holder is None)

    @invariant()
    def cursors_stay_between_where_they_were_and_the_tail(self) -> None:
        for path, link in self.sub.links.items():
            tail = self.log.tail(path)
            assert link.acked <= (tail or BEFORE_FIRST)
            assert (link.acked == BEFORE_FIRST) == (tail is None)
            assert link.acked >= self.cursors.get(path, "")
            self.cursors[path] = link.acked

    @invariant()
    def every_existing_match_is_linked(self) -> None:
        for name in self.log.streams:
            if name.startswith("events/"):
                assert self.sub.links[name].glob
        for path, link in self.sub.links.items():
            assert link.explicit or link.glob
            assert link.explicit or path in self.log.streams


TestSubscriptionStates = SubscriptionStates.TestCase
TestSubscriptionStates.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
