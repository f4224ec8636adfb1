"""The log does what its hundred-line model does, whatever happens to it: restarts, crashes, checkpoints."""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.log_harness import MEMORY, LogHarness, Pending
from support.log_model import Append, Lifetime, Model, ModelStream, RefusedError
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.decide import resolve_position
from tailrace.log.listing import list_streams
from tailrace.log.model import Stream
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE, is_json

JSON, TEXT = "application/json", "text/plain"
NAMES = ["a", "b", "c/d", "e", "f", "g/h"]
TTLS_S = [10, 100]
TEXTS = [b"1.0", b'{"n": 1}', b'"\\u00e9"', b"[ ]", b'{"a":"' + b"x" * 40 + b'"}']

picks = st.integers(0, 59)
wild = st.sampled_from([False, False, False, False, True])
types = st.sampled_from([None, JSON, JSON, TEXT, "Application/JSON; charset=utf-8"])
keys = st.sampled_from([None, None, b"k1", "schl\u00fcssel".encode()])
hints_s = st.sampled_from([None, None, -1000, -1, 1, 200, 100_000])


@dataclass
class AppendStep:
    """An append in terms of what the streams are at that moment, so that most of them fit."""

    pick: int
    wild: bool
    count: int
    number: int
    type_as: str | None
    closes: bool
    key: bytes | None
    hint_s: int | None
    seq: bytes | None
    producer: tuple[str, int, int] | None  # id, epoch and seq relative to the known state


@dataclass
class CreateStep:
    pick: int
    wild: bool
    content_type: str | None
    lifetime: Lifetime
    closed: bool
    count: int
    fork: tuple[int, int | None, int, int] | None  # source, entry from its tail, epoch shift, sub-offset


@dataclass
class DeleteStep:
    pick: int
    wild: bool = False


appends = st.builds(
    AppendStep,
    pick=picks,
    wild=wild,
    count=st.sampled_from([0, 1, 1, 1, 1, 1, 2, 2, 3, 3]),
    number=st.integers(0, len(TEXTS) - 1),
    type_as=st.sampled_from([None, None, None, JSON, TEXT]),
    closes=st.sampled_from([False] * 19 + [True]),
    key=keys,
    hint_s=hints_s,
    seq=st.sampled_from([None, None, None, b"1", b"2", b"10", b"\xff"]),
    producer=st.one_of(
        st.none(),
        st.tuples(
            st.sampled_from(["p", "q"]), st.sampled_from([0, 0, 0, 1, -1]), st.sampled_from([1, 1, 0, 2])
        ),
    ),
)
lifetimes: st.SearchStrategy[Lifetime] = st.one_of(
    st.just((None, None)),
    st.just((None, None)),
    st.just((None, None)),
    st.tuples(st.sampled_from(TTLS_S), st.none()),
    st.tuples(st.none(), st.sampled_from([0, 50, 10_000])),
)
closings = st.sampled_from([False] * 9 + [True])
creates = st.builds(
    CreateStep,
    pick=picks,
    wild=wild,
    content_type=types,
    lifetime=lifetimes,
    closed=closings,
    count=st.sampled_from([0, 0, 1, 3]),
    fork=st.none(),
)
forks = st.builds(
    CreateStep,
    pick=picks,
    wild=wild,
    content_type=st.sampled_from([None, None, None, JSON]),
    lifetime=lifetimes,
    closed=closings,
    count=st.sampled_from([0, 0, 1, 2]),
    fork=st.tuples(
        picks,
        st.one_of(st.none(), st.integers(-4, 0), st.integers(-4, 1)),
        st.sampled_from([0, 0, 0, -1, 1]),
        st.sampled_from([0, 0, 1, 2, 7]),
    ),
)
deletes = st.builds(DeleteStep, picks)
Step = AppendStep | CreateStep | DeleteStep
steps = st.lists(st.one_of(appends, appends, creates, creates, deletes), min_size=1, max_size=4)
# One rule that draws what to do, so that every run is a mixture: the engine leaves whole rules out of a run.
actions = st.one_of(
    st.tuples(st.just("change"), steps),
    st.tuples(st.just("change"), st.lists(appends, min_size=1, max_size=4)),
    st.tuples(st.just("change"), st.lists(appends, min_size=1, max_size=4)),
    st.tuples(st.just("fork"), forks),
    st.tuples(st.just("fork"), forks),
    st.tuples(st.just("live"), st.sampled_from([0, 0, 0.001, 4, 9, 11, 120]), picks),
    st.tuples(st.just("store"), st.sampled_from(["all", "all", "one", "untold", "retire"])),
    st.tuples(st.just("store"), st.just("all")),
    st.tuples(st.just("seal"), picks, st.sampled_from(["", "", "tidy", "all", "all"])),
    st.tuples(
        st.just("restart"),
        st.lists(st.one_of(appends, deletes), max_size=4),
        st.sampled_from([-1, 0, 1, 2, 3]),
    ),
)


class LogStates(RuleBasedStateMachine):
    """Steps are taken in the real log and in the model; answers, states and every read must agree."""

    @initialize(cache_bytes=st.sampled_from([0, 300, 2**20]), file_bytes=st.sampled_from([300, 2048]))
    def begin(self, cache_bytes: int, file_bytes: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tailrace-model-", dir=MEMORY))
        limits = Limits(
            journal_file_bytes=file_bytes, block_cache_bytes=cache_bytes, seal_entries=3, seal_bytes=80
        )
        self.real = LogHarness(self.directory, limits)
        self.model = Model()
        self.turn = 0
        self.look = True

    def teardown(self) -> None:
        if hasattr(self, "real"):
            self.real.close()
            shutil.rmtree(self.directory)

    @property
    def now_ns(self) -> int:
        return self.real.clock.now_ns()

    # -- steps -------------------------------------------------------------------------------------------

    @rule(action=actions, look=st.booleans())
    def act(self, action: tuple[Any, ...], look: bool) -> None:
        self.look = look
        kind, *arguments = action
        getattr(self, kind)(*arguments)

    def change(self, burst: list[Step]) -> None:
        """Several requests at once: each is judged as if those before it were done."""
        waiting: list[tuple[Pending, int | bool | str | None]] = []
        if not self.living():
            burst = [
                CreateStep(
                    burst[0].pick, False, [JSON, TEXT][burst[0].pick % 2], (None, None), False, 0, None
                ),
                *burst,
            ]
            if isinstance(burst[-1], CreateStep) and burst[-1].fork is not None:
                self.change(burst[:-1])
                burst = burst[-1:]
        for step in burst:
            name = self.name_of(step)
            waiting.append((self.take(step, name), self.take_in_model(step, name)))
        self.real.settle()
        for pending, expected in waiting:
            check_answer(pending, expected)

    def fork(self, step: CreateStep) -> None:
        self.change([step])

    def live(self, seconds: float, pick: int) -> None:
        """Time goes by, and then somebody reads, which renews a sliding lifetime."""
        self.real.clock.advance(seconds)
        # Renewals may be written down late and recovery errs towards living longer, by a tenth of the window:
        # within that tenth both answers are right, so time does not stop there.
        while any(self.uncertain(stream) for stream in self.model.streams.values()):
            self.real.clock.advance(1)
        for name in NAMES:
            self.model.find(name, self.now_ns)
        self.real.sweep()
        name = self.name_of(DeleteStep(pick))
        stream, found = self.real.find(name), self.model.find(name, self.now_ns)
        if stream is not None and found is not None and not stream.gone:
            self.real.call(self.real.log.touch, stream)
            found.touched_ns = self.now_ns

    def uncertain(self, stream: ModelStream) -> bool:
        ttl_s, deadline_ns = stream.lifetime[0], stream.deadline_ns()
        if ttl_s is None or deadline_ns is None or stream.gone:
            return False
        return deadline_ns <= self.now_ns <= deadline_ns + ttl_s * 10**8

    def store(self, kind: str) -> None:
        """Moves journal files into the hot store; what is there leaves memory."""
        if kind in ("all", "retire"):
            self.real.log.retire_active_file()
        if kind == "all":
            # The next record begins a new file, and with it the one before is retired.
            self.real.put_meta("turn", str(self.turn).encode())
            while self.real.retired:
                self.real.checkpoint(tell=True)
        elif kind != "retire":
            self.real.checkpoint(tell=kind == "one")

    def seal(self, pick: int, then: str) -> None:
        """Moves a stream to the object store: for everybody who reads it nothing changes."""
        if pick % 3:
            self.store("all")
        stream = self.real.find(self.name_of(DeleteStep(pick)))
        if stream is not None:
            self.real.seal(stream)
        if then == "tidy":
            self.real.tidy()
        elif then:
            self.store(then)

    def restart(self, burst: list[Step], turns: int) -> None:
        """With a close, or without: then what was not acknowledged may be there or not, but only in order."""
        if turns < 0:
            self.real.reopen()
            return
        possible = [copy.deepcopy(self.model)]
        for step in burst:
            name = self.name_of(step)
            self.take(step, name)
            self.take_in_model(step, name)
            possible.append(copy.deepcopy(self.model))
        if turns == 3:
            self.real.settle()
            possible = possible[-1:]
        self.real.crash(turns=turns)
        self.real.sweep()
        tails = {name: stream.visible for name in NAMES if (stream := self.real.find(name)) is not None}
        events = len(self.real.registry())
        fitting = [
            model for model in possible if self.tails_in(model) == tails and len(model.events) == events
        ]
        assert fitting
        self.model = fitting[-1]

    def tails_in(self, model: Model) -> dict[str, int]:
        for name in NAMES:
            model.find(name, self.now_ns)
        return {name: stream.tail for name, stream in model.streams.items()}

    # -- taking a step -----------------------------------------------------------------------------------

    def name_of(self, step: Step) -> str:
        """Mostly a name that fits: one that exists, or for a creation one that does not."""
        fitting = self.living()
        if isinstance(step, CreateStep):
            fitting = [name for name in NAMES if name not in self.model.streams]
        choice = NAMES if step.wild or not fitting else fitting
        return choice[step.pick % len(choice)]

    def living(self) -> list[str]:
        return [name for name in NAMES if name in self.model.streams and not self.model.streams[name].gone]

    def take(self, step: Step, name: str) -> Pending:
        self.real.clock.advance(0.001)
        if isinstance(step, DeleteStep):
            return self.real.delete(name)
        if isinstance(step, AppendStep):
            return self.real.append(name, self.append_of(step, name))
        initial, fork = self.initial_of(step), self.fork_of(step)
        return self.real.create(name, step.content_type, self.lifetime_of(step), initial, fork)

    def take_in_model(self, step: Step, name: str) -> int | bool | str | None:
        """The model's answer: entries added, whether the stream is new, or the code of the refusal."""
        try:
            if isinstance(step, DeleteStep):
                self.model.delete(name, self.now_ns)
                return None
            if isinstance(step, AppendStep):
                return self.model.append(name, self.append_of(step, name), self.now_ns)
            initial, fork = self.initial_of(step), self.fork_of(step)
            source = None if fork is None else self.model.find(fork[0], self.now_ns)
            content_type = step.content_type
            if initial.payloads and self.model.find(name, self.now_ns) is None:
                content_type = (
                    content_type or (None if source is None else source.content_type) or DEFAULT_CONTENT_TYPE
                )
            return self.model.create(name, content_type, self.lifetime_of(step), initial, fork, self.now_ns)
        except RefusedError as refusal:
            return str(refusal)

    def append_of(self, step: AppendStep, name: str) -> Append:
        found = self.model.streams.get(name)
        content_type = (
            step.type_as or (found.content_type if found is not None else None) or DEFAULT_CONTENT_TYPE
        )
        held = None if found is None else found.content_type
        payloads = payloads_of(step.count, step.number, content_type, held is None or is_json(held))
        producer = None
        if step.producer is not None:
            producer_id, epoch, seq = step.producer
            known = (0, -1) if found is None else found.producers.get(producer_id, (0, -1))
            producer = (producer_id, max(0, known[0] + epoch), max(0, 0 if epoch > 0 else known[1] + seq))
        hint_ns = None if step.hint_s is None else max(0, self.now_ns + step.hint_s * 10**9)
        closes = step.closes or not payloads
        return Append(payloads, content_type, closes, step.key, hint_ns, step.seq, producer)

    def initial_of(self, step: CreateStep) -> Append:
        content_type = step.content_type
        if content_type is None and step.fork is not None:
            source = self.model.streams.get(self.source_of(step.fork[0]))
            content_type = None if source is None else source.content_type
        content_type = content_type or DEFAULT_CONTENT_TYPE
        return Append(payloads_of(step.count, step.count, content_type, True), content_type, step.closed)

    def fork_of(self, step: CreateStep) -> tuple[str, tuple[int, int] | None, int] | None:
        if step.fork is None:
            return None
        pick, back, shift, sub = step.fork
        source = self.source_of(pick)
        found = self.model.streams.get(source)
        if back is None or found is None:
            return source, None, sub
        entry = max(0, found.tail + back)
        epoch = found.entries[entry - 1].epoch if 0 < entry <= found.tail else found.epoch
        return source, (max(0, epoch + shift), entry), sub

    def source_of(self, pick: int) -> str:
        return self.name_of(DeleteStep(pick, wild=pick % 10 == 0))

    def lifetime_of(self, step: CreateStep) -> Lifetime:
        ttl_s, expires_s = step.lifetime
        return ttl_s, None if expires_s is None else self.real.start_ns + expires_s * 10**9

    # -- looking -----------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "real") and self.look:
            self.look_at_everything()

    def look_at_everything(self) -> None:
        self.turn += 1
        for name in NAMES:
            stream, found = self.real.find(name), self.model.find(name, self.now_ns)
            self.real.settle()
            if stream is None or found is None:
                assert stream is None
                assert found is None
                tombstone = self.real.log.streams.tombstone(name)
                kept = None if tombstone is None else (tombstone.epoch, tombstone.reason)
                assert kept == self.model.tombstones.get(name)
                continue
            check_state(stream, found)
            self.check_positions(stream, found)
            self.check_reads(stream, found)
        assert sorted(self.real.registry(), key=repr) == sorted(
            [
                (kind, name, closed, last or DEFAULT_CONTENT_TYPE)
                for kind, name, closed, last in self.model.events
            ],
            key=repr,
        )
        self.check_listing()

    def check_positions(self, stream: Stream, found: ModelStream) -> None:
        for epoch in range(found.epoch + 2):
            for entry in {0, 1, found.inherited, found.tail, found.tail + 1}:
                assert outcome(resolve_position, stream, (epoch, entry), 0) == outcome(
                    found.resolve, epoch, entry
                )
        reader = self.real.log.reader
        for entry in range(max(0, found.tail - 3), found.tail):
            assert self.real.time_of(stream, entry + 1) == found.entries[entry].time_ns
        for instant_ns in {0, self.now_ns, *(entry.time_ns + 1 for entry in found.entries[-3:])}:
            assert self.real.run(reader.find_before(stream, instant_ns)) == found.since(instant_ns)

    def check_reads(self, stream: Stream, found: ModelStream) -> None:
        apart = self.turn % 2 == 0
        glue = b"," if is_json(found.content_type) and not apart else b""
        for key in (None, b"k1", b"none"):
            bytes_max, entries_max = [(2**20, 1000), (50, 1000), (1, 1), (2**20, 2), (120, 5)][self.turn % 5]
            after = self.turn % (found.tail + 1)
            while True:
                page = self.real.read(stream, after, bytes_max, entries_max, key, apart=apart)
                covered = found.entries[after : page.next_entry]
                wanted = [entry.payload for entry in covered if key is None or entry.key == key]
                assert glue.join([bytes(part) for part in page.parts]) == glue.join(wanted)
                assert page.count == len(wanted)
                check_page_size(found, page.next_entry, wanted, bytes_max, entries_max, key)
                if page.next_entry >= found.tail:
                    assert page.next_entry == found.tail
                    break
                assert page.next_entry > after
                after = page.next_entry

    def check_listing(self) -> None:
        expected = sorted(name for name, found in self.model.streams.items() if not found.gone)
        listed: list[str] = []
        limit = self.turn % 3 + 1
        while page := self.real.call(
            list_streams, self.real.log, listed[-1] if listed else "", "", limit, False
        ):
            listed += [stream.name for stream in page]
        assert listed == expected


def payloads_of(count: int, number: int, content_type: str, cut: bool) -> list[bytes]:
    if is_json(content_type) and cut:
        return [TEXTS[(number + n) % len(TEXTS)] for n in range(count)]
    return [b"bytes \x00\xff" + b"%d" % number] if count else []


def check_answer(pending: Pending, expected: int | bool | str | None) -> None:
    assert pending.settled
    assert pending.code == (expected if isinstance(expected, str) else None)
    if type(expected) is int:
        assert pending.count == expected


def check_state(stream: Stream, found: ModelStream) -> None:
    assert stream.visible == stream.tail == found.tail
    assert stream.stored <= stream.visible
    assert stream.offset(stream.visible) == found.offset(found.tail)
    assert stream.offset(0) == found.offset(0)
    assert stream.closed is stream.visible_closed is found.closed
    assert stream.closed_by == found.closed_by
    assert stream.content_type == found.content_type
    assert stream.seq == found.seq
    assert (stream.lifetime.ttl_s, stream.lifetime.expires_ns) == found.lifetime
    assert stream.forks == found.forks
    assert stream.gone is found.gone
    own = found.entries[found.inherited :]
    assert stream.size_bytes == sum(len(entry.payload) for entry in own)
    assert stream.queued_bytes == 0
    deadline_ns, expected_ns = stream.deadline_ns(), found.deadline_ns()
    if deadline_ns is not None and expected_ns is not None:
        slack_ns = (found.lifetime[0] or 0) * 10**8
        assert expected_ns <= deadline_ns <= expected_ns + slack_ns


def check_page_size(
    found: ModelStream, end: int, wanted: list[bytes], bytes_max: int, entries_max: int, key: bytes | None
) -> None:
    """Never too large, apart from a single entry; never needlessly small."""
    size = sum(map(len, wanted))
    assert len(wanted) <= entries_max
    assert size <= bytes_max or len(wanted) == 1
    if key is None and end < found.tail and len(wanted) < entries_max:
        assert size + len(wanted) + len(found.entries[end].payload) + 1 > bytes_max


def outcome(function: Any, *arguments: Any) -> object:
    try:
        return function(*arguments)
    except TailraceError as refusal:
        return refusal.code
    except RefusedError as refusal:
        return str(refusal)


TestLogStates = LogStates.TestCase
TestLogStates.settings = settings(
    derandomize=True,
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
