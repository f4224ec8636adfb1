"""A hub without a network or a disk: decisions are carried out at once, and time stands still until moved."""

from __future__ import annotations

import json
from collections import deque
from itertools import count
from typing import Any

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.hub import decide, session_lifecycle
from tailrace.hub.effects import (
    Append,
    AppendOutcome,
    Close,
    CreateStream,
    Defer,
    DeleteStream,
    Effect,
    ListStreams,
    Read,
    ReadResult,
    ResumeReading,
    Send,
    SendMany,
    StreamSummary,
)
from tailrace.hub.policy import Policy
from tailrace.hub.restore import MESSAGE_STREAMS, HubRestore
from tailrace.hub.session import Session
from tailrace.hub.state import Hub, HubOptions
from tailrace.protocol import offsets

START_MS = 1_767_225_600_000
HUB = "@(cloudflare/signal-hub)"

Frame = dict[str, Any]


class MemoryStreams:
    """Streams as lists of (time in ns, body)."""

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[int, bytes]]] = {}
        self.producers: dict[tuple[str, str], tuple[int, int]] = {}
        self._created_ms: dict[str, int] = {}
        self.trimmed: dict[str, int] = {}  # entries up to these are gone

    def tail(self, stream: str) -> int | None:
        found = self.entries.get(stream)
        return None if found is None else len(found)

    def earliest(self, stream: str) -> int:
        return self.trimmed.get(stream, 0)

    def created_ms(self, stream: str) -> int:
        return self._created_ms.get(stream, 0)

    def make(self, stream: str, now_ms: int) -> list[tuple[int, bytes]]:
        self._created_ms.setdefault(stream, now_ms)
        return self.entries.setdefault(stream, [])

    def remove(self, stream: str) -> None:
        self.entries.pop(stream, None)
        self._created_ms.pop(stream, None)
        self.trimmed.pop(stream, None)

    def names(self, prefix: str, after: str, limit: int) -> list[StreamSummary]:
        found = sorted(name for name in self.entries if name.startswith(prefix) and name > after)[:limit]
        return [
            StreamSummary(
                name,
                self.earliest(name),
                len(self.entries[name]),
                self.size_bytes(name),
                self._created_ms[name],
                self.entries[name][-1][0] // 1_000_000 if self.entries[name] else 0,
            )
            for name in found
        ]

    def size_bytes(self, stream: str) -> int:
        return sum(len(body) for _, body in self.entries.get(stream, ()))

    def offset(self, stream: str, entry: int) -> str:
        return offsets.encode_offset(0, entry)

    def resolve(self, stream: str, offset: str) -> int:
        entry = offsets.parse_offset(offset)[1]
        if entry > len(self.entries.get(stream, ())):
            raise TailraceError("offset_beyond_tail", "the offset is past the end of the stream")
        return entry

    def bodies(self, stream: str) -> list[Any]:
        return [json.loads(body) for _, body in self.entries.get(stream, ())]

    def append(self, effect: Append, now_ms: int) -> AppendOutcome:
        if effect.producer is not None:
            name, epoch, seq = effect.producer
            known = self.producers.get((effect.stream, name))
            if known is not None and (epoch, seq) <= known:
                return AppendOutcome(duplicate=True)
            if seq != (0 if known is None or epoch > known[0] else known[1] + 1):
                return AppendOutcome(error=TailraceError("producer_gap", "a gap", expected_seq=0))
            self.producers[(effect.stream, name)] = (epoch, seq)
        entries = self.make(effect.stream, now_ms)
        place = 0
        for length in effect.lengths or [len(effect.body)]:
            entries.append((now_ms * 1_000_000, effect.body[place : place + length]))
            place += length + 1
        return AppendOutcome(len(entries), self.offset(effect.stream, len(entries)))


class HeldBack:
    """A connection that says what it still holds."""

    def __init__(self, unsent: dict[Session, int], session: Session) -> None:
        self._unsent, self._session = unsent, session

    @property
    def unsent_bytes(self) -> int:
        return self._unsent.get(self._session, 0)

    unsent_bytes_most = unsent_bytes


class World:
    """The hub, its streams, and the clock. Appends wait while `held`."""

    def __init__(
        self, *, limits: Limits | None = None, policy: Policy | None = None, options: HubOptions | None = None
    ) -> None:
        self.now = START_MS
        self.streams = MemoryStreams()
        self._secrets = count(1)
        self._ids = count(1)
        self.limits = limits or Limits()
        self._policy, self._options = policy or Policy(), options or HubOptions()
        self.hub = self._fresh()
        self.raw: list[bytes] = []  # what was sent, byte for byte
        self.said: dict[Session, list[Frame]] = {}
        self.closes: dict[Session, int] = {}
        self.unsent: dict[Session, int] = {}
        self.held: deque[Append] | None = None
        self.held_reads: deque[Read] | None = None  # reads from a slow disk wait for `read_held`
        self.full_streams: set[str] = set()  # appends to these streams fail
        self.turns: deque[Defer] | None = None  # a list: they wait for `turn`
        self._queue: deque[Effect] = deque()
        self._busy = False

    def _fresh(self) -> Hub:
        secret = lambda: f"secret-{next(self._secrets)}"  # noqa: E731
        hub = Hub(self.limits, self.streams, self._policy, self._options, secret)
        hub.mailboxes.cursors.now_ms = self.now
        return hub

    # -- carrying out ----------------------------------------------------------------------------------

    def run(self, effects: list[Effect]) -> None:
        self._queue.extend(effects)
        if self._busy:
            return
        self._busy = True
        while self._queue:
            self._carry_out(self._queue.popleft())
        self._busy = False

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._write(effect.session, effect.frame)
        elif isinstance(effect, SendMany):
            for session, frame in effect.copies:
                self._write(session, frame)
        elif isinstance(effect, Append):
            if self.held is not None:
                self.held.append(effect)
            else:
                self._commit(effect)
        elif isinstance(effect, Read):
            if self.held_reads is not None:
                self.held_reads.append(effect)
            else:
                self._read(effect)
        elif isinstance(effect, Close):
            self.closes[effect.session] = effect.code
            self.run(decide.on_closed(self.hub, effect.session, effect.code, self.now))
        elif isinstance(effect, Defer):
            if self.turns is not None:
                self.turns.append(effect)
            else:
                self._take_turn(effect)
        elif isinstance(effect, CreateStream):
            self.streams.make(effect.stream, self.now)
        elif isinstance(effect, DeleteStream):
            self.streams.remove(effect.stream)
        elif isinstance(effect, ListStreams):
            effect.then(self.streams.names(effect.prefix, effect.after, effect.names_max), self.now)
            self.run(decide.collect_effects(self.hub, self.now))
        else:
            assert isinstance(effect, ResumeReading)

    def _write(self, session: Session, frame: bytes) -> None:
        self.raw.append(frame)
        self.said.setdefault(session, []).append(json.loads(frame))
        session.outbox.written(len(frame))

    def _commit(self, effect: Append) -> None:
        if effect.stream in self.full_streams:
            settled = AppendOutcome(error=TailraceError("insufficient_storage", "the disk is full"))
        else:
            settled = self.streams.append(effect, self.now)
        if effect.then is not None:
            effect.then(settled, self.now)
            self.run(decide.collect_effects(self.hub, self.now))

    def _take_turn(self, effect: Defer) -> None:
        effect.then(self.now)
        self.run(decide.collect_effects(self.hub, self.now))

    def turn(self) -> bool:
        """Lets whoever gave others a turn go on; False if nobody did."""
        if not self.turns:
            return False
        self._take_turn(self.turns.popleft())
        return True

    def hold(self) -> None:
        """Appends are not durable until `commit_held`."""
        self.held = deque()

    def commit_held(self) -> None:
        """Everything that waited becomes durable, in order."""
        held, self.held = self.held or deque(), None
        for effect in held:
            self._commit(effect)

    def commit_next(self) -> None:
        """The first of what waits becomes durable, if anything does; the rest goes on waiting."""
        if self.held:
            self._commit(self.held.popleft())

    def hold_reads(self) -> None:
        """Reads have no result until `read_held`."""
        self.held_reads = deque()

    def read_held(self) -> None:
        """The last read has its result first."""
        held, self.held_reads = self.held_reads or deque(), None
        for effect in reversed(held):
            self._read(effect)

    def _read(self, effect: Read) -> None:
        entries = self.streams.entries.get(effect.stream, [])
        after = effect.after
        if effect.since_ns is not None:
            after = sum(1 for time_ns, _ in entries if time_ns < effect.since_ns)
        if after < self.streams.earliest(effect.stream):
            effect.then(ReadResult(error=TailraceError("offset_gone", "trimmed")), self.now)
            self.run(decide.collect_effects(self.hub, self.now))
            return
        page = entries[after : after + effect.entries_max]
        numbered = tuple((after + 1 + place, time_ns, body) for place, (time_ns, body) in enumerate(page))
        effect.then(ReadResult(numbered, after + len(page)), self.now)
        self.run(decide.collect_effects(self.hub, self.now))

    # -- clients ---------------------------------------------------------------------------------------

    def open(self) -> Session:
        session = Session(f"session-{next(self._ids)}", self.now)
        session.outbox.connection = HeldBack(self.unsent, session)
        self.said[session] = []
        decide.on_opened(self.hub, session)
        return session

    def connect(self, address: str, *words: str, **metadata: Any) -> Session:
        session = self.open()
        self.say(
            session,
            "hub:connect",
            frm=address,
            metadata={"protocolVersion": "0.1.0", "capabilities": ["test", *words], **metadata},
        )
        return session

    def actor(self, address: str, *words: str, **payload: Any) -> Session:
        """Connected and registered; nothing of that is left to read."""
        session = self.connect(address, *words)
        self.say(session, "hub:register", {"actorAddress": address, "capabilities": ["test"], **payload})
        assert self.said[session][-1]["type"] in ("hub:registered", "hub:presence") or payload, self.said
        self.said[session].clear()
        return session

    def say(
        self,
        session: Session,
        kind: str,
        payload: Any = None,
        *,
        frm: str | None = None,
        metadata: Any = None,
        **more: Any,
    ) -> str:
        frame: Frame = {
            "id": f"m-{next(self._ids)}",
            "from": frm,
            "to": HUB,
            "type": kind,
            "payload": payload,
            "pattern": "ask",
            "timestamp": self.now,
            "metadata": metadata,
        }
        frame |= more
        self.run(decide.decide(self.hub, session, json.dumps(frame).encode(), self.now))
        return frame["id"]

    def ask(self, session: Session, kind: str, payload: Any = None, **more: Any) -> Frame:
        """The answer, which has to be there already."""
        message_id = self.say(session, kind, payload, **more)
        found = [frame for frame in self.said[session] if frame["correlationId"] == message_id]
        assert found, self.said[session]
        self.said[session].remove(found[-1])
        return found[-1]

    def taken(self, session: Session) -> list[Frame]:
        """What it was sent since the last time."""
        found, self.said[session] = self.said[session], []
        return found

    def lose(self, session: Session, code: int = 1006) -> None:
        self.run(decide.on_closed(self.hub, session, code, self.now))

    def drain(self, session: Session) -> None:
        self.unsent.pop(session, None)
        self.run(decide.on_drained(self.hub, session, self.now))

    def wait(self, ms: int) -> None:
        """Time passes, second by second."""
        end = self.now + ms
        while self.now < end:
            self.now = min(end, self.now + 1000)
            self.run(decide.tick(self.hub, self.now))

    def crash(self) -> None:
        """The process is killed and started again: only what was durable is left."""
        self.held = self.held_reads = None
        self._queue.clear()
        self.hub = self._fresh()
        for name in self.streams.entries:
            if name.startswith("hub/topic/"):
                self.hub.topics.stored_topics.add(name.removeprefix("hub/topic/"))
        restoring = HubRestore(self.hub)
        for name, take in (
            ("hub/registry", restoring.registry),
            ("hub/subscriptions", restoring.subscription),
            ("hub/cursors/0", restoring.cursor),
        ):
            for _, body in self.streams.entries.get(name, ()):
                take(body)
        restoring.finish(self.now)
        for place, (_, body) in enumerate(self.streams.entries.get("hub/broadcast/0", ())):
            restoring.broadcast(place + 1, body)
        for _, body in self.streams.entries.get("hub/dead-letters", ()):
            restoring.letter(body)
        since_ns = (self.now - self.limits.hub_seen_ttl_ms) * 1_000_000
        for name, entries in self.streams.entries.items():
            for place, (time_ns, body) in enumerate(entries if name.startswith(MESSAGE_STREAMS) else ()):
                if time_ns >= since_ns:
                    restoring.message(name, place + 1, time_ns, body)

    def shut_down(self) -> None:
        session_lifecycle.disconnect_all(self.hub, {}, self.now)
        self.run(decide.collect_effects(self.hub, self.now))
