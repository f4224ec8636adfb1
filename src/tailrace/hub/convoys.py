"""Broadcasts of one session that are under way: one after the other, or side by side if they go to the same.

A connection that is given two copies in one turn of the loop is written to once. So broadcasts that follow
each other closely, to the same recipients, go in step: none overtakes the one before it, and once they are
abreast, all together have as many copies in a turn as one alone would have.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.common import failpoints
from tailrace.hub.effects import Defer

if TYPE_CHECKING:
    from tailrace.hub.broadcast import ActiveBroadcast
    from tailrace.hub.session import Session
    from tailrace.hub.state import Hub

BATCH_RECIPIENTS: Final = 100
CONCURRENT_BROADCASTS_MAX: Final = 4
# Whoever comes later than this waits: those in front would have to wait for it.
JOIN_RECIPIENTS_MAX: Final = 3 * BATCH_RECIPIENTS
BROADCAST_TYPE: Final = "hub:broadcast"


class _TypeOnly(msgspec.Struct, gc=False):
    type: str


_decode_type: Final = msgspec.json.Decoder(_TypeOnly).decode


class BroadcastBatching:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._under_way: dict[Session, list[ActiveBroadcast]] = {}  # in the order in which they were accepted

    def takes(self, session: Session, frame: bytes) -> bool:
        """Whether a message may be looked at although the broadcast before it is under way."""
        line = self._under_way.get(session)
        if not line or len(line) >= CONCURRENT_BROADCASTS_MAX or line[0].place > JOIN_RECIPIENTS_MAX:
            return False
        return line[0].is_direct and all(one.is_in_step for one in line[1:]) and _is_broadcast(frame)

    def add(self, broadcast: ActiveBroadcast, now_ms: int) -> None:
        line = self._under_way.setdefault(broadcast.session, [])
        line.append(broadcast)
        if len(line) == 1:
            broadcast.begin(now_ms)
        elif broadcast.is_direct and broadcast.recipients == line[0].recipients:
            broadcast.is_in_step = True
            self._hub.count("messages", "broadcast/ok")
            if line[0].place <= BATCH_RECIPIENTS:
                # It came right behind: what it says first is written with what was said before it.
                broadcast.give(line[0].place, now_ms)

    def remove(self, broadcast: ActiveBroadcast, now_ms: int) -> None:
        """It came to nothing."""
        self._under_way[broadcast.session].remove(broadcast)
        self._next(broadcast.session, now_ms)

    def go_on(self, session: Session, now_ms: int) -> None:
        """The next batch, then a turn for the others."""
        failpoints.reached("hub.before_batch")
        line = self._under_way[session]
        abreast = [line[0], *takewhile(lambda one: one.is_in_step, line[1:])]
        room = BATCH_RECIPIENTS
        for before, one in pairwise(abreast):
            # Whoever joined late catches up first.
            room -= one.give(min(room, before.place - one.place), now_ms)
        if room == BATCH_RECIPIENTS:
            for one in abreast:
                one.give(BATCH_RECIPIENTS // len(abreast), now_ms)
        for one in abreast:
            if one.is_done:
                failpoints.reached("hub.before_broadcast_ack")
                line.remove(one)
                one.acknowledge(now_ms)
            else:
                one.tell_progress(now_ms)
        if abreast[-1].is_done:
            self._next(session, now_ms)
        else:
            self._hub.effects.append(Defer(partial(self.go_on, session)))
            self._hub.go_on(session, now_ms)

    def _next(self, session: Session, now_ms: int) -> None:
        """None of those that go side by side is left."""
        line = self._under_way[session]
        if line:
            line[0].begin(now_ms)
            return
        del self._under_way[session]
        session.broadcasting = False
        self._hub.go_on(session, now_ms)


def _is_broadcast(frame: bytes) -> bool:
    if BROADCAST_TYPE.encode() not in frame:
        return False
    try:
        return _decode_type(frame).type == BROADCAST_TYPE
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
