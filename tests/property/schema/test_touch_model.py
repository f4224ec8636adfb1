"""Touches against a plain model: no change that a wait listens to goes by unnoticed."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tailrace.common.clock import FakeClock
from tailrace.schema.profiles import touch_keys
from tailrace.schema.profiles.state_protocol import parse_touch
from tailrace.schema.profiles.touch_keys import JournalLayer
from tailrace.schema.profiles.touch_state import StaleCursor, TouchState, new_touch_document
from tailrace.schema.profiles.touch_waits import parse_wait

ENTITIES = ("todos", "users")
VALUES = ("a", "a", "b", None)
TEMPLATES = (("todos", ("s",)), ("todos", ("s", "t")), ("users", ("t",)))
REPLAY_MAX = 30
NEVER = 10**9

whole_rows = st.fixed_dictionaries(
    {"s": st.sampled_from(VALUES), "t": st.sampled_from(VALUES), "n": st.integers(0, 1)}
)
rows = whole_rows | st.fixed_dictionaries({}, optional={"s": st.just("a"), "n": st.just(0)})
changes = st.fixed_dictionaries(
    {
        "type": st.sampled_from(ENTITIES),
        "key": st.just("k"),
        "value": rows,
        "headers": st.fixed_dictionaries({"operation": st.sampled_from(["insert", "update", "delete"])}),
    },
    optional={"old_value": rows | st.none()},
)
configurations = st.just({"enabled": True}) | st.fixed_dictionaries(
    {"enabled": st.just(True)},
    optional={
        "onMissingBefore": st.sampled_from(["coarse", "skipBefore", "error"]),
        "fineTouchBudgetPerBatch": st.integers(0, 6),
        "fineBurstTokens": st.integers(0, 20),
        "lagDegradeFineTouchesAtSourceOffsets": st.integers(0, 3),
        "memory": st.fixed_dictionaries({"pendingMaxKeys": st.integers(1, 12)}),
        "templates": st.fixed_dictionaries(
            {},
            optional={
                "maxActiveTemplatesPerStream": st.integers(1, 2),
                "defaultInactivityTtlMs": st.just(500),
            },
        ),
    },
)


def text(value: object) -> str | None:
    return None if value is None else str(value)


def arguments(fields: tuple[str, ...], row: Any) -> list[str] | None:
    found = [text((row or {}).get(field)) for field in fields]
    return None if None in found else [one for one in found if one is not None]


def emitted(change: dict[str, Any], entity: str, fields: tuple[str, ...]) -> set[int]:
    """The fine keys of one template, straight from the rules, where the images say enough."""
    if change["type"] != entity:
        return set()
    identity = touch_keys.template_id(entity, fields)
    operation, value, old = change["headers"]["operation"], change.get("value"), change.get("old_value")
    found: set[int] = set()
    if operation != "update":
        row = value if operation == "insert" or old is None else old
        if (found_arguments := arguments(fields, row)) is not None:
            found |= {
                touch_keys.watch_key(identity, found_arguments),
                touch_keys.membership_key(identity, found_arguments),
            }
        return found
    if old is None or value is None:
        return {-1}  # anything
    before, after = arguments(fields, old), arguments(fields, value)
    for one in (before, after):
        if one is not None:
            found.add(touch_keys.watch_key(identity, one))
            if before != after:
                found.add(touch_keys.membership_key(identity, one))
            for field in old.keys() | value.keys():
                if old.get(field) != value.get(field):
                    found.add(touch_keys.field_key(identity, field, one))
    return found


class Pending:
    def __init__(self, request: dict[str, Any], cursor: int) -> None:
        self.request = request
        self.cursor = cursor
        self.answer: dict[str, Any] | None = None

    def take(self, answer: dict[str, Any]) -> None:
        self.answer = answer


class TouchMachine(RuleBasedStateMachine):
    """The stream is a list; the state is fed from it late, restarted, and starved of budget."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self.clock = FakeClock()
        self.config = parse_touch({"enabled": True}, "touch")
        self.document = new_touch_document()
        self.state = TouchState.load(self.config, self.document, "s", self.clock, 0)
        self.cursors = [0]
        self.pending: list[Pending] = []
        self.periods: dict[int, list[list[int]]] = {}  # when each template was active, from and before

    @rule(body=configurations)
    def restart(self, body: dict[str, Any]) -> None:
        for one in self.pending:
            one.answer = {"gone": True}
        self.pending = []
        self.document = self.state.to_document()
        self.config = parse_touch(body, "touch")
        head = len(self.entries)
        self.state = TouchState.load(self.config, self.document, "s", self.clock, head)

    @initialize(body=configurations, templates=st.lists(st.sampled_from(TEMPLATES), max_size=3))
    def begin_with(self, body: dict[str, Any], templates: list[tuple[str, tuple[str, ...]]]) -> None:
        self.restart(body)
        for template in templates:
            self.activate(template)

    @rule(batch=st.lists(changes, min_size=1, max_size=3))
    def append(self, batch: list[dict[str, Any]]) -> None:
        self.entries += batch

    @rule(batch=st.lists(changes, min_size=1, max_size=3))
    def append_and_absorb(self, batch: list[dict[str, Any]]) -> None:
        self.entries += batch
        self.absorb(6, True)

    @rule(most=st.integers(1, 6), wakes=st.booleans())
    def absorb(self, most: int, wakes: bool) -> None:
        absorbed = self.state.journal.absorbed
        self.state.budget.begin_batch(len(self.entries) - absorbed)
        for sequence in range(absorbed, min(len(self.entries), absorbed + most)):
            self.state.apply(sequence, self.entries[sequence])
        if wakes:
            self.state.flush()

    @rule(template=st.sampled_from(TEMPLATES))
    def activate(self, template: tuple[str, tuple[str, ...]]) -> None:
        entity, fields = template
        body = {"templates": [{"entity": entity, "fields": [{"name": name} for name in fields]}]}
        self.state.activate(body)
        self.note_periods()

    def note_periods(self) -> None:
        active = self.state.templates.active
        for identity, periods in self.periods.items():
            if identity not in active and periods[-1][1] is NEVER:
                periods[-1][1] = self.state.journal.absorbed
        for identity, one in active.items():
            periods = self.periods.setdefault(identity, [])
            if not periods or periods[-1][1] is not NEVER:
                periods.append([one.active_from, NEVER])

    @rule(seconds=st.sampled_from([0.1, 1, 100, 100_000]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.state.expire_templates()
        self.note_periods()
        self.state.expire()

    @rule()
    def capture(self) -> None:
        self.cursors.append(len(self.entries))

    @rule(
        data=st.data(),
        template=st.sampled_from(TEMPLATES),
        values=st.tuples(st.sampled_from("abc"), st.sampled_from("abc")),
        kind=st.sampled_from(["watch", "watch", "membership", "field", "table"]),
        exact=st.booleans(),
        named=st.booleans(),
        timeout_ms=st.sampled_from([0, 50, 60_000]),
    )
    def wait(
        self,
        data: st.DataObject,
        template: tuple[str, tuple[str, ...]],
        values: tuple[str, str],
        kind: str,
        exact: bool,
        named: bool,
        timeout_ms: int,
    ) -> None:
        entity, fields = template
        identity = touch_keys.template_id(entity, fields)
        given = list(values[: len(fields)])
        key = {
            "watch": touch_keys.watch_key(identity, given),
            "membership": touch_keys.membership_key(identity, given),
            "field": touch_keys.field_key(identity, "n", given),
            "table": touch_keys.table_key(entity),
        }[kind]
        # Most often from shortly before: the fewer changes, the fewer chances to be right by accident.
        back = data.draw(st.sampled_from([0, 1, 1, 2, 4]))
        cursor = data.draw(st.sampled_from([self.cursors[-1], max(0, len(self.entries) - back)]))
        request = {
            "cursor": f"{self.state.epoch}:{cursor}",
            "keys": [touch_keys.format_key(key)],
            "exact": exact,
            "timeoutMs": timeout_ms,
            "templateIdsUsed": [touch_keys.format_key(identity)] if named else [],
        }
        pending = Pending(
            {**request, "key": key, "template": template, "named": named, "table": kind == "table"}, cursor
        )
        self.begin(pending, request)
        self.pending.append(pending)

    def begin(self, pending: Pending, request: dict[str, Any]) -> None:
        parsed = parse_wait(request)
        head = len(self.entries)
        try:
            cursor = self.state.cursor_of(parsed, head)
            floor = self.state.journal.floor
            if cursor < floor:
                if floor - cursor > REPLAY_MAX:
                    raise StaleCursor("too far back")
                past = JournalLayer(cursor)
                for sequence in range(cursor, floor):
                    self.state.derive(past, sequence, self.entries[sequence])
                self.state.journal.extend_back(past, floor)
                if self.state.journal.floor > cursor:
                    raise StaleCursor("no room")
            self.state.begin(parsed, cursor, pending.take)
        except StaleCursor as stale:
            pending.take(self.state.stale(parsed, stale.message, head))

    def listened_and_changed(self, one: Pending, upto: int) -> bool:
        """By the rules: whether an entry from the cursor on emits a key that the wait listens to."""
        template: tuple[str, tuple[str, ...]] = one.request["template"]
        for sequence in range(one.cursor, upto):
            change = self.entries[sequence]
            if change["type"] != template[0]:
                continue
            if one.request["table"]:
                return True
            periods = self.periods.get(touch_keys.template_id(*template), [])
            if not any(first <= sequence < end for first, end in periods):
                if one.request["named"]:
                    return True  # the gap is judged by the table
                continue
            found = emitted(change, *template)
            if one.request["key"] in found or -1 in found:
                return True
        return False

    @invariant()
    def t1_no_wake_up_is_missed(self) -> None:
        for one in self.pending:
            if one.answer is None:
                continue
            if one.answer.get("stale") or one.answer.get("gone") or one.answer["touched"]:
                continue
            decided = int(one.answer["cursor"].partition(":")[2])
            assert not self.listened_and_changed(one, decided), (one.request, one.answer)
        self.pending = [one for one in self.pending if one.answer is None]

    def teardown(self) -> None:
        """In the end everybody is told: who still waits was touched by nothing."""
        absorbed = self.state.journal.absorbed
        for sequence in range(absorbed, len(self.entries)):
            self.state.apply(sequence, self.entries[sequence])
        self.state.flush()
        for one in self.pending:
            if one.answer is None:
                assert not self.listened_and_changed(one, len(self.entries)), one.request


TestT1NoMissedWakeUp = TouchMachine.TestCase
TestT1NoMissedWakeUp.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
