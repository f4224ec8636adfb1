"""H-24: every send is counted once, as what became of it, and the counts are those of what was there."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.hub_world import Frame, MemoryStreams, World
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.hub.effects import Append, AppendOutcome
from tailrace.hub.errors import ERROR_TYPES
from tailrace.hub.session import Session

SENDER, PLAIN, KEPT, RESTING, SLOW, NOBODY = (
    f"@(t/{name})" for name in ("sender", "plain", "kept", "resting", "slow", "nobody")
)
SMALL = Limits(
    hub_pause_bytes=2000,
    hub_outbound_bytes=4000,
    hub_resume_messages=3,
    hub_mailbox_entries=6,
    hub_seen_ttl_ms=60_000,
    hub_stall_ms=10**9,
)
ACKS = (None, None, "delivered", "accepted", "processed", ["accepted", "processed"])
MORE: tuple[dict[str, Any], ...] = ({}, {}, {}, {"durable": True}, {"durable": False}, {"type": ""})
AT_ONCE = ("unknown_actor", "mailbox_full", "consumer_slow", "resume_buffer_full")


class FullDisk(MemoryStreams):
    """Takes no message while `is_full`."""

    is_full = False

    def append(self, effect: Append, now_ms: int) -> AppendOutcome:
        if self.is_full and effect.stream.startswith("hub/mbox/"):
            return AppendOutcome(error=TailraceError("unavailable", "the disk is full"))
        return super().append(effect, now_ms)


class Ledger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = world = World(limits=SMALL)
        self.disk = FullDisk()
        world.streams = world.hub.streams = self.disk
        self.sender = world.actor(SENDER, "delivery-notices")
        self.slow = world.actor(SLOW, ttlSeconds=3600)
        world.actor(PLAIN, ttlSeconds=3600)
        self.kept: Session | None = world.actor(KEPT, durable=True, ttlSeconds=3600)
        self.resting: Session | None = None
        self.resume_token: str | None = None
        self.return_from_rest()
        self.frames: list[tuple[Frame, int]] = []  # sends, each once, and when
        self.seqs: Counter[str] = Counter()  # of the producer, by target
        self.repeats = 0

    # -- what happens ----------------------------------------------------------------------------------

    def _send(self, payload: Frame, **more: Any) -> None:
        frame = {"payload": payload, "id": f"n-{len(self.frames)}", **more}
        self.frames.append((frame, self.world.now))
        self.world.say(self.sender, "hub:send", frm=SENDER, **frame)

    @rule(
        to=st.sampled_from((PLAIN, KEPT, RESTING, SLOW, NOBODY)),
        ack=st.sampled_from(ACKS),
        size=st.sampled_from((0, 1000)),
        more=st.sampled_from(MORE),
        ttl=st.sampled_from((None, None, 1, 3000)),
        times=st.integers(1, 5),
    )
    def send(self, to: str, ack: Any, size: int, more: dict[str, Any], ttl: int | None, times: int) -> None:
        payload = {"to": to, "type": "n", "data": "x" * size, **more}
        if ack is not None:
            payload["ack"] = ack
        for _ in range(times):
            self._send(payload, pattern="tell" if ack is None else "ask", ttl=ttl)

    @rule(to=st.sampled_from((PLAIN, KEPT)), back=st.integers(0, 1))
    def produce(self, to: str, back: int) -> None:
        """As one who cannot always know whether the last one was taken."""
        self.world.commit_held()
        seq, before = max(0, self.seqs[to] - back), self._entries(to)
        self._send({"to": to, "type": "n"}, metadata={"producer": {"id": "w", "epoch": 0, "seq": seq}})
        self.seqs[to] += self._entries(to) - before

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """What was not refused, and is remembered."""
        self.world.commit_held()
        refused, since = self.refused(), self.world.now - SMALL.hub_seen_ttl_ms // 2
        known = [frame for frame, at in self.frames if frame["id"] not in refused and at > since]
        if known:
            self.repeats += 1
            self.world.say(self.sender, "hub:send", frm=SENDER, **data.draw(st.sampled_from(known)))

    @rule()
    def leave_or_return(self) -> None:
        if self.kept is not None:
            self.world.lose(self.kept, 1000)
            self.kept = None
        else:
            self.kept = self.world.connect(KEPT)
            payload = {"actorAddress": KEPT, "capabilities": ["x"], "ttlSeconds": 3600, "durable": True}
            self.world.say(self.kept, "hub:register", payload)

    @rule()
    def rest(self) -> None:
        if self.resting is not None:
            self.world.lose(self.resting)
            self.resting = None

    @rule()
    def return_from_rest(self) -> None:
        if self.resting is None:
            self.resting = self.world.connect(RESTING, "resume", resumeToken=self.resume_token)
            welcome = next(one for one in self.world.said[self.resting] if one["type"] == "hub:connected")
            self.resume_token = welcome["payload"]["resumeToken"]
            payload = {"actorAddress": RESTING, "capabilities": ["x"], "ttlSeconds": 3600}
            self.world.say(self.resting, "hub:register", payload)

    @rule(held=st.sampled_from((0, 3000, 5000)))
    def slow_down(self, held: int) -> None:
        self.world.drain(self.slow)
        self.world.unsent[self.slow] = held

    @rule(is_full=st.booleans())
    def fill(self, is_full: bool) -> None:
        self.disk.is_full = is_full

    @rule()
    def hold(self) -> None:
        if self.world.held is None:
            self.world.hold()

    @rule()
    def settle(self) -> None:
        self.world.commit_held()

    @rule(seconds=st.sampled_from((1, 35)))
    def wait(self, seconds: int) -> None:
        self.world.commit_held()  # or an ask would be told that nobody knows
        self.world.wait(seconds * 1000)

    # -- what was really there -------------------------------------------------------------------------

    def _entries(self, name: str) -> int:
        return self.disk.tail(f"hub/mbox/{name[2:-1]}") or 0

    def answers(self) -> list[Frame]:
        return [one for one in self.world.said[self.sender] if (one["correlationId"] or "").startswith("n-")]

    def refused(self) -> dict[str, str]:
        """What was answered by an error, and which: not what was accepted and came to nothing later."""
        errors = [one for one in self.answers() if one["type"] in ERROR_TYPES]
        return {
            one["correlationId"]: one["payload"]["code"]
            for one in errors
            if one["payload"].get("details", {}).get("outcome") != "unknown"
            or one["payload"]["code"] not in ("timeout", "message_expired")
        }

    def letters(self, *reasons: str) -> int:
        return sum(one["count"] for one in self.disk.bodies("hub/dead-letters") if one["reason"] in reasons)

    # -- what always holds -----------------------------------------------------------------------------

    @invariant()
    def every_send_is_counted_once(self) -> None:
        if self.world.held is not None:
            return  # some are under way
        counts, refused = self.world.hub.counts, self.refused()
        results = {
            label[5:]: n for (name, label), n in counts.items() if name == "messages" and "send/" in label
        }
        modes = {label: n for (name, label), n in counts.items() if name == "deliveries"}
        found = Counter(results)
        duplicates = {one["correlationId"] for one in self.answers() if one["payload"].get("duplicate")}
        assert found["repeated"] == self.repeats + len(duplicates)
        sent = len(self.frames) - len(duplicates)
        assert sent == found["delivered"] + found["queued"] + found["dead"] + found["refused"], found
        assert found["refused"] == len(refused), refused
        told = sum(code == "consumer_slow" for code in refused.values())
        assert found["dead"] + told == self.letters(*AT_ONCE)
        deliveries = Counter(modes)
        taken = deliveries["direct"] + deliveries["waiting"] + deliveries["stored"]
        assert found["delivered"] + found["queued"] == taken
        assert deliveries["stored"] == sum(map(self._entries, (PLAIN, KEPT, RESTING, SLOW)))
        heard = sum(one["type"] == "n" for frames in self.world.said.values() for one in frames)
        waits = [frame for one in self.world.hub.sessions.values() for frame in one.resume_buffer or ()]
        waiting = sum(b'"type":"n"' in frame for frame in waits)
        reached = deliveries["direct"] + deliveries["log"] + deliveries["waiting"]
        assert heard + waiting + self.letters("resume_expired") == reached


class TestH24(Ledger.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
