"""Touches of one stream: keys, templates, marks, limits and time, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.common.clock import FakeClock
from tailrace.common.errors import TailraceError
from tailrace.schema.profiles import touch_keys
from tailrace.schema.profiles.state_protocol import TouchConfig, parse_touch
from tailrace.schema.profiles.touch_state import StaleCursor, TouchState, new_touch_document
from tailrace.schema.profiles.touch_waits import parse_wait

ENTITY = "public.todos"
OPEN = {"status": "open", "tenantId": "t1", "title": "x"}
TEMPLATE = touch_keys.template_id(ENTITY, ["tenantId", "status"])
WATCH = touch_keys.watch_key(TEMPLATE, ["open", "t1"])
DECLARED = {"entity": ENTITY, "fields": [{"name": "tenantId", "encoding": "string"}, {"name": "status"}]}


class Touches:
    """A state, its clock, and the answers of its waits."""

    def __init__(self, **config: Any) -> None:
        self.clock = FakeClock()
        self.config = parse_touch({"enabled": True, **config}, "touch")
        self.document = new_touch_document()
        self.state = self.load(0)
        self.answers: list[dict[str, Any]] = []

    def load(self, start: int) -> TouchState:
        return TouchState.load(self.config, self.document, "s", self.clock, start)

    def change(self, operation: str = "insert", entity: str = ENTITY, **images: Any) -> None:
        record = {"type": entity, "key": "1", "headers": {"operation": operation}, **images}
        self.state.apply(self.state.journal.absorbed, record)

    def activate(self, *declared: dict[str, Any], **more: Any) -> dict[str, Any]:
        answer: Any = self.state.activate({"templates": list(declared or (DECLARED,)), **more})[0]
        self.document = self.state.to_document()
        return answer

    def wait(self, key: int = WATCH, cursor: int = 0, **more: Any) -> dict[str, Any] | None:
        request = parse_wait(
            {"cursor": f"{self.state.epoch}:{cursor}", "keys": [touch_keys.format_key(key)], **more}
        )
        self.state.begin(request, self.state.cursor_of(request, 10**6), self.answers.append)
        return self.answers[-1] if self.answers else None

    def flush(self) -> list[dict[str, Any]]:
        self.answers.clear()
        self.state.flush()
        return self.answers


def test_t6_keys_match_the_vectors() -> None:
    arguments = ["open", "t1"]
    found = [
        touch_keys.table_key(ENTITY),
        TEMPLATE,
        touch_keys.template_key(TEMPLATE),
        touch_keys.watch_key(TEMPLATE, arguments),
        touch_keys.membership_key(TEMPLATE, arguments),
        touch_keys.field_key(TEMPLATE, "title", arguments),
    ]
    assert [touch_keys.format_key(key) for key in found] == [
        "feadeb84d447fd63",
        "03d5826f0bf1e3e7",
        "a440dcf9d1c07171",
        "0af6023939b30f26",
        "a7b1b1fd3cfa6ed1",
        "0848fb073b348b65",
    ]
    assert touch_keys.key_id("feadeb84d447fd63") == 0xD447FD63
    assert touch_keys.key_id(" Some Key ") == touch_keys.key_id("some key") != touch_keys.key_id("other")


@pytest.mark.parametrize(
    ("value", "encoding", "text"),
    [
        ("x ", "string", "x "),
        (1.0, "string", "1"),
        (True, "string", "true"),
        (" 7", "int64", "7"),
        (7.0, "int64", "7"),
        (7.5, "int64", None),
        (2**63, "int64", None),
        (True, "int64", None),
        (True, "bool", "1"),
        ("true", "bool", None),
        ("2026-01-01T01:00:00+01:00", "datetime", "2026-01-01T00:00:00.000Z"),
        (0, "datetime", "1970-01-01T00:00:00.000Z"),
        ("soon", "datetime", None),
        ("YQ==", "bytes", "YQ=="),
        (5, "bytes", None),
        (None, "string", None),
        ([1], "string", None),
    ],
)
def test_arguments_as_text(value: object, encoding: str, text: str | None) -> None:
    assert touch_keys.encode_argument(value, encoding) == text


def test_t2_a_change_before_the_first_wait_is_reported() -> None:
    touches = Touches()
    touches.activate()
    touches.change(value=OPEN)
    answer = touches.wait()
    assert answer is not None
    assert answer["touched"] is True
    assert answer["cursor"] == f"{touches.state.epoch}:1"
    assert answer["bucketMaxSourceOffsetSeq"] == "0"


def test_t5_a_quiet_wait_ends_when_its_time_is_over_and_not_before() -> None:
    touches = Touches()
    touches.activate()
    assert touches.wait(timeoutMs=60_000) is None
    touches.clock.advance(59.9)
    touches.state.expire()
    assert touches.answers == []
    touches.clock.advance(0.2)
    touches.state.expire()
    assert touches.answers[0]["touched"] is False
    assert not touches.state.waiters.all


def test_t7_exact_waits_are_not_woken_by_what_is_unrelated() -> None:
    touches = Touches()
    touches.activate()
    named = {"exact": True, "templateIdsUsed": [touch_keys.format_key(TEMPLATE)]}
    assert touches.wait(**named) is None
    touches.change(value=OPEN | {"tenantId": "t2"})
    touches.change("update", value=OPEN | {"status": "b"}, old_value=OPEN | {"status": "c"})
    touches.change(entity="other", value=OPEN)
    assert touches.flush() == []
    touches.change("delete", old_value=OPEN)
    assert touches.flush()[0]["touched"] is True


@pytest.mark.parametrize(
    ("key", "before", "after", "touched"),
    [
        (WATCH, OPEN, OPEN | {"title": "y"}, True),
        (WATCH, OPEN, OPEN | {"status": "done"}, True),
        (touch_keys.membership_key(TEMPLATE, ["open", "t1"]), OPEN, OPEN | {"title": "y"}, False),
        (touch_keys.membership_key(TEMPLATE, ["open", "t1"]), OPEN, OPEN | {"status": "done"}, True),
        (touch_keys.field_key(TEMPLATE, "title", ["open", "t1"]), OPEN, OPEN | {"title": "y"}, True),
        (touch_keys.field_key(TEMPLATE, "title", ["open", "t1"]), OPEN, OPEN | {"done": True}, False),
        (WATCH, OPEN | {"tenantId": "t2"}, OPEN | {"tenantId": "t2", "title": "y"}, False),
        (WATCH, OPEN | {"tenantId": None}, OPEN, True),
    ],
)
def test_updates_touch_what_they_change(key: int, before: object, after: object, touched: bool) -> None:
    touches = Touches()
    touches.activate()
    touches.change("update", old_value=before, value=after)
    answer = touches.wait(key, exact=True, timeoutMs=0)
    assert answer is not None
    assert answer["touched"] is touched


@pytest.mark.parametrize("policy", ["coarse", "skipBefore", "error"])
def test_without_an_image_of_before_everybody_on_the_entity_wakes(policy: str) -> None:
    touches = Touches(onMissingBefore=policy)
    touches.activate()
    elsewhere = touch_keys.watch_key(TEMPLATE, ["done", "t9"])
    touches.wait(elsewhere, exact=True, templateIdsUsed=[touch_keys.format_key(TEMPLATE)])
    touches.wait(elsewhere, exact=True)
    touches.change("update", value=OPEN)
    assert [answer["touched"] for answer in touches.flush()] == [True, True]
    assert touches.state.errors == (policy == "error")


def test_budgets_and_lag_shed_precision_and_no_wake_up() -> None:
    touches = Touches(fineTouchBudgetPerBatch=2, lagDegradeFineTouchesAtSourceOffsets=5)
    touches.activate()
    touches.state.budget.begin_batch(1)
    for _ in range(3):
        touches.change(value=OPEN | {"tenantId": "t2"})
    assert touches.state.coarse_marks == 2
    for lag, mode, kind in (
        (6, "restricted", "templateKey"),
        (21, "coarseOnly", "tableKey"),
        (1, "fine", "fineKey"),
    ):
        touches.state.budget.begin_batch(lag)
        assert touches.state.mode == mode
        answer = touches.wait(cursor=3, timeoutMs=0, templateIdsUsed=[touch_keys.format_key(TEMPLATE)])
        assert answer is not None
        assert (answer["touched"], answer["effectiveWaitKind"]) == (False, kind)


def test_a_bucket_that_overflows_wakes_everyone() -> None:
    touches = Touches(memory={"pendingMaxKeys": 3})
    touches.activate()
    touches.wait(touch_keys.table_key("elsewhere"))
    for tenant in "abc":
        touches.change(value=OPEN | {"tenantId": tenant})
    assert [answer["touched"] for answer in touches.flush()] == [True]
    assert touches.state.meta(3, "")["overflowBuckets"] == 1


def test_t4_templates_and_the_epoch_outlive_a_restart() -> None:
    touches = Touches()
    answer = touches.activate(inactivityTtlMs=5000)
    epoch = touches.state.epoch
    assert answer["activated"] == [
        {"templateId": "03d5826f0bf1e3e7", "state": "active", "activeFromTouchOffset": f"{epoch}:0"}
    ]
    touches.change(value=OPEN)
    touches.state = touches.load(1)
    assert touches.state.epoch == epoch
    assert TEMPLATE in touches.state.templates.active
    assert TouchState.load(TouchConfig(), touches.document, "a fork", touches.clock, 1).epoch != epoch


def test_a_stream_that_lost_entries_tells_of_those_that_take_their_numbers() -> None:
    touches = Touches()
    for _ in range(5):
        touches.change(value={})
    touches.activate()
    touches.state = touches.load(3)  # two entries are lost with the disk
    touches.change(value=OPEN)
    answer = touches.wait(cursor=3)
    assert answer is not None
    assert answer["touched"] is True


def test_templates_are_retired_remembered_and_forgotten() -> None:
    touches = Touches()
    touches.activate(inactivityTtlMs=5000)
    named = {"templateIdsUsed": [touch_keys.format_key(TEMPLATE)], "timeoutMs": 0}
    touches.clock.advance(6)
    assert touches.state.expire_templates()
    touches.change(value={"anything": 1})
    answer = touches.wait(**named)
    assert answer is not None
    assert answer["touched"] is True  # by the table
    touches.clock.advance(25 * 3600)
    assert touches.state.expire_templates()
    with pytest.raises(StaleCursor) as stale:
        touches.wait(cursor=1, **named)
    assert "03d5826f0bf1e3e7" in stale.value.message
    assert stale.value.delayed


def test_a_template_activated_after_the_cursor_judges_the_gap_by_the_table() -> None:
    touches = Touches()
    touches.change(value=OPEN | {"tenantId": "t2"})
    touches.activate()
    named = {"templateIdsUsed": [touch_keys.format_key(TEMPLATE)], "timeoutMs": 0, "exact": True}
    assert touches.wait(cursor=0, **named) is not None
    assert touches.answers.pop()["touched"] is True
    touches.change(value=OPEN | {"tenantId": "t2"})
    answer = touches.wait(cursor=1, **named)
    assert answer is not None
    assert answer["touched"] is False


def test_caps_evict_who_was_seen_least_and_nobody_who_is_waited_on() -> None:
    touches = Touches(templates={"maxActiveTemplatesPerStream": 2, "activationRateLimitPerMinute": 4})
    others = [{"entity": f"e{n}", "fields": [{"name": "a"}]} for n in range(5)]
    touches.activate(others[0])
    touches.clock.advance(1)
    touches.activate(others[1])
    touches.activate(others[2])
    assert {one.entity for one in touches.state.templates.active.values()} == {"e1", "e2"}
    for name in ("e1", "e2"):
        touches.wait(templateIdsUsed=[touch_keys.format_key(touch_keys.template_id(name, ["a"]))])
    assert touches.activate(others[3])["denied"][0]["reason"] == "limit"
    assert touches.activate(others[4])["denied"][0]["reason"] == "rate_limited"
    invalid = {"entity": "e", "fields": [{"name": str(n)} for n in range(4)]}
    assert touches.activate(invalid)["denied"][0]["reason"] == "invalid"
    assert touches.activate(others[1])["denied"] == []  # idempotent, whatever the limits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cursor": "x"}, "wait.cursor must be in the form <epochHex>:<generation> or 'now'"),
        ({"cursor": None}, "wait.cursor must be in the form <epochHex>:<generation> or 'now'"),
        ({"keys": []}, "wait requires keys or keyIds"),
        ({"keys": ["a"] * 1025}, "wait.keys too large (max 1024)"),
        ({"keyIds": [1] * 1025}, "wait.keyIds too large (max 1024)"),
        ({"keyIds": [-1]}, "wait.keyIds[0] must be an integer from 0 to 4294967295"),
        ({"interestMode": "some"}, "wait.interestMode must be 'fine' or 'coarse'"),
        ({"exact": True}, "wait.exact requires 1 to 16 literal 64-bit routing keys"),
        ({"exact": True, "keys": ["0" * 16] * 17}, "wait.exact requires 1 to 16 literal 64-bit routing keys"),
        (
            {"exact": True, "keys": ["0" * 16], "interestMode": "coarse"},
            "wait.exact requires 1 to 16 literal 64-bit routing keys",
        ),
        ({"timeoutMs": 120_001}, "wait.timeoutMs must be an integer from 0 to 120000"),
        ({"templateIdsUsed": ["x"]}, "wait.templateIdsUsed must hold template ids of 16 hex digits"),
        ({"other": 1}, "wait.other is not supported"),
    ],
)
def test_waits_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TailraceError) as refusal:
        parse_wait({"cursor": "now", "keys": ["a"], **change})
    assert refusal.value.message == message
