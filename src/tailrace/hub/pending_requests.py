"""Requests that wait for an acknowledgement or a reply, with their deadlines.

When asks are over if nobody answers them. Most are answered long before, and then cost nothing more.

Asks that wait: for an ack level, for a reply. Each gets one outcome per level, and one in the end.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from tailrace.hub import requests
from tailrace.hub.deduplication import SeenMessage, SeenMessages
from tailrace.hub.envelope import new_id
from tailrace.hub.errors import HubError, field_error
from tailrace.hub.requests import OutgoingMessage
from tailrace.hub.sender import Sender, stamp_reply
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.requests import HubRequest
    from tailrace.hub.state import Hub


SECOND_MS: Final = 1000


class RequestDeadlines:
    """Asks by the second in which they end, so that one which was answered can be taken out at once.

    A heap of asks would keep each until its time had come: at ten thousand a second, hundreds of thousands.
    """

    __slots__ = ("_by_second", "_seconds")

    def __init__(self) -> None:
        self._by_second: dict[int, dict[str, PendingRequest]] = {}  # by the id of the copy
        self._seconds: list[int] = []  # a heap of the keys of those

    def __len__(self) -> int:
        return sum(map(len, self._by_second.values()))

    def add(self, ask: PendingRequest) -> None:
        second = ask.deadline_ms // SECOND_MS
        found = self._by_second.get(second)
        if found is None:
            found = self._by_second[second] = {}
            heapq.heappush(self._seconds, second)
        found[ask.copy_id] = ask

    def remove(self, ask: PendingRequest) -> None:
        found = self._by_second.get(ask.deadline_ms // SECOND_MS)
        if found is not None:
            found.pop(ask.copy_id, None)

    def take_due(self, now_ms: int) -> list[PendingRequest]:
        """Those whose time is over, in the order of their deadlines."""
        due: list[PendingRequest] = []
        while self._seconds and self._seconds[0] <= now_ms // SECOND_MS:
            second = self._seconds[0]
            found = self._by_second[second]
            due += sorted(
                (ask for ask in found.values() if ask.deadline_ms <= now_ms), key=lambda ask: ask.deadline_ms
            )
            if second == now_ms // SECOND_MS:
                break  # the rest of this second is still to come
            heapq.heappop(self._seconds)
            del self._by_second[second]
        return due


ACK_LEVELS: Final = ("delivered", "accepted", "processed")
PARTIAL_REPLIES_MAX: Final = 1000
CLOSED_REQUESTS_MAX: Final = 10_000
ORPHANED_REQUESTS_MAX: Final = 10_000
REQUEST_TTL_MS_MAX: Final = 300_000
_quoted: Final = msgspec.json.Encoder().encode


class PendingRequest(msgspec.Struct, eq=False):
    """One request that is not answered in full."""

    request_id: str
    asker: Session | None
    asker_path: str
    recipient: str
    deadline_ms: int
    levels: list[str]
    expects_reply: bool
    trace: bytes
    copy_id: str = ""
    recipient_session: Session | None = None
    reached: str | None = None
    stream: str | None = None
    entry: int = 0
    offset: str | None = None
    partials: int = 0
    duplicate: bool = False
    seen: tuple[SeenMessages, SeenMessage] | None = None
    done: bool = False

    @property
    def open(self) -> bool:
        return bool(self.levels) or self.expects_reply

    @property
    def own(self) -> bytes:
        """What the copy of a publication says more in its metadata if it is to be answered."""
        return b',"originalMessageId":%b,"replyBy":%d' % (_quoted(self.request_id), self.deadline_ms)


class PendingRequests:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._by_copy: dict[str, PendingRequest] = {}
        # Those that are to be replied to, by the request's id, then by the copy's.
        self._by_request: dict[str, dict[str, PendingRequest]] = {}
        self._stored: dict[str, dict[int, PendingRequest]] = {}  # by stream and entry
        self.deadlines = RequestDeadlines()
        # Copies whose asks are over: a late reply is told from a forged one, and kept as a dead letter.
        self._closed: OrderedDict[str, tuple[str, str, str]] = OrderedDict()
        self._orphans: OrderedDict[str, None] = OrderedDict()  # copies of asks that nobody waits for just now

    def __len__(self) -> int:
        return len(self._by_copy)

    # -- beginning -------------------------------------------------------------------------------------

    def check_room(self, session: Session) -> None:
        if len(session.asked) >= self._hub.limits.hub_session_asks:
            details = {"retryAfter": 1000, "kind": "ask", "reason": "open_asks"}
            raise HubError("rate_limited", "too many asks are open on this session", details)

    def begin(self, ask: PendingRequest) -> None:
        """From here on it has a deadline and an outcome."""
        self._by_copy[ask.copy_id] = ask
        if ask.expects_reply:
            self._by_request.setdefault(ask.request_id, {})[ask.copy_id] = ask
        if ask.asker is not None:
            ask.asker.asked[ask.copy_id] = None
        if ask.recipient_session is not None:
            ask.recipient_session.owner_of[ask.copy_id] = None
        self.deadlines.add(ask)

    def rebuild(
        self, copy: OutgoingMessage, recipient: str, stream: str, entry: int, offset: str, now_ms: int
    ) -> PendingRequest | None:
        """An ask that this process does not know of: it was stored before a restart."""
        metadata = requests.parse_metadata(copy)
        original, by = metadata.get("originalMessageId"), metadata.get("replyBy")
        if copy.pattern != "ask" or original is None or by is None or int(bytes(by)) <= now_ms:
            return None
        ask = PendingRequest(
            msgspec.json.decode(original, type=str),
            None,
            copy.sender.path,
            recipient,
            int(bytes(by)),
            [],
            True,
            b"{}",
            copy_id=copy.id,
            reached="accepted",
            stream=stream,
            entry=entry,
            offset=offset,
        )
        self.begin(ask)
        self._stored.setdefault(stream, {})[entry] = ask
        self._orphaned(ask)
        return ask

    def adopt(self, request_id: str, sender: str, session: Session) -> bool:
        """Whether somebody who asks again takes up an ask of its own that nobody waited for."""
        for ask in self._by_request.get(request_id, {}).values():
            if ask.asker is None and ask.asker_path == sender:
                ask.asker = session
                session.asked[ask.copy_id] = None
                self._orphans.pop(ask.copy_id, None)
                return True
        return False

    def sent_to(self, ask: PendingRequest, session: Session) -> None:
        ask.recipient_session = session
        session.owner_of[ask.copy_id] = None

    def _end(self, ask: PendingRequest) -> None:
        if ask.done:
            return
        ask.done = True
        self._by_copy.pop(ask.copy_id, None)
        self.deadlines.remove(ask)
        self._orphans.pop(ask.copy_id, None)
        same = self._by_request.get(ask.request_id)
        if same is not None:
            same.pop(ask.copy_id, None)
            if not same:
                del self._by_request[ask.request_id]
        if ask.stream is not None and (waiting := self._stored.get(ask.stream)) is not None:
            waiting.pop(ask.entry, None)
            if not waiting:
                del self._stored[ask.stream]
        if ask.asker is not None:
            ask.asker.asked.pop(ask.copy_id, None)
        if ask.recipient_session is not None:
            ask.recipient_session.owner_of.pop(ask.copy_id, None)
        if ask.expects_reply:
            self._closed[ask.copy_id] = (ask.asker_path, ask.request_id, ask.recipient)
            if len(self._closed) > CLOSED_REQUESTS_MAX:
                self._closed.popitem(last=False)
        if ask.seen is not None and not ask.seen[1].finished:
            ask.seen[1].finished = True

    # -- levels ----------------------------------------------------------------------------------------

    def committed(
        self, ask: PendingRequest, stream: str, entry: int, offset: str | None, *, online: bool, now_ms: int
    ) -> None:
        """The message is an entry of a stream."""
        ask.stream, ask.entry, ask.offset, ask.reached = stream, entry, offset, "accepted"
        if ask.done:
            return
        if entry:
            self._stored.setdefault(stream, {})[entry] = ask
        if "accepted" in ask.levels:
            self._ack(ask, "accepted", "accepted", "accepted", now_ms)
        if "delivered" in ask.levels and not online:
            self._ack(ask, "delivered", "queued", "accepted", now_ms)

    def handed(
        self, ask: PendingRequest, now_ms: int, *, waits: bool = False, processed: bool = False
    ) -> None:
        """The recipient's connection has it, or will have it when the client is back."""
        if "delivered" in ask.levels:
            status = "queued" if waits else "delivered"
            self._ack(ask, "delivered", status, "accepted" if waits and ask.stream else "delivered", now_ms)
        if processed and "processed" in ask.levels:
            self._ack(ask, "processed", "processed", "delivered", now_ms)
        if ask.reached is None or ask.reached == "accepted":
            ask.reached = "delivered"

    def stored_at(self, stream: str, entry: int, recipient: str) -> PendingRequest | None:
        """What an entry asks of this one among those who are given it."""
        waiting = self._stored.get(stream)
        found = None if waiting is None else waiting.get(entry)
        return found if found is not None and found.recipient == recipient else None

    def passed(self, stream: str, upto: int, now_ms: int) -> None:
        """A recipient's committed position has passed these entries."""
        waiting = self._stored.get(stream)
        if not waiting:
            return
        for entry in sorted(entry for entry in waiting if entry <= upto):
            ask = waiting[entry]
            if "delivered" in ask.levels:
                self._ack(ask, "delivered", "delivered", "delivered", now_ms)
            if "processed" in ask.levels:
                self._ack(ask, "processed", "processed", "processed", now_ms)

    def failed(self, ask: PendingRequest, error: HubError, now_ms: int) -> None:
        """None of the levels that are left can be reached, nor a reply come."""
        if ask.done:
            return
        levels = max(1, len(ask.levels) + ask.expects_reply)
        ask.levels, ask.expects_reply = [], False
        for place in range(levels):
            self._say(ask, self._error_frame(ask, error, now_ms), final=place == levels - 1)
        self._end(ask)

    def answered(self, ask: PendingRequest, frame: bytes) -> None:
        """All that was asked for is reached, and this is what says so."""
        if not ask.done:
            ask.levels.clear()
            self._say(ask, frame, final=True)
            self._end(ask)

    def _ack(self, ask: PendingRequest, wanted: str, status: str, level: str, now_ms: int) -> None:
        ask.levels.remove(wanted)
        payload = (
            b'{"messageId":%b,"deliveredAt":%d,"status":"%b","level":"%b","stream":%b,"offset":%b,"duplicate":%b}'
            % (
                _quoted(ask.request_id),
                now_ms,
                status.encode(),
                level.encode(),
                b"null" if ask.stream is None else _quoted(ask.stream),
                b"null" if ask.offset is None else b'"%b"' % ask.offset.encode(),
                b"true" if ask.duplicate else b"false",
            )
        )
        frame = self._frame(ask, "hub:delivery_ack", payload, now_ms)
        self._say(ask, frame, final=not ask.open)
        if not ask.open:
            self._end(ask)

    def _frame(self, ask: PendingRequest, kind: str, payload: bytes, now_ms: int) -> bytes:
        return self._hub.encode(
            f"@({ask.asker_path})", kind, payload, now_ms, correlation_id=ask.request_id, metadata=ask.trace
        )

    def _error_frame(self, ask: PendingRequest, error: HubError, now_ms: int) -> bytes:
        return self._hub.error_frame(
            ask.asker_path, error, now_ms, request_id=ask.request_id, trace=ask.trace
        )

    def _say(self, ask: PendingRequest, frame: bytes, *, final: bool) -> None:
        """To the asker, and to whoever repeated the same request meanwhile."""
        told: tuple[object, ...] = ()
        if ask.seen is not None:
            told = ask.seen[0].answer(ask.seen[1], frame, final=final)
        if ask.asker is not None:
            self._hub.control(ask.asker, frame)
        for waiter in told:
            if waiter is not ask.asker and isinstance(waiter, Session):
                self._hub.control(waiter, frame)

    # -- replies ---------------------------------------------------------------------------------------

    def reply(self, session: Session, request: HubRequest, now_ms: int) -> None:
        """The answer of an actor. Only who was asked may give it; the asker is taken from the ask."""
        correlation = request.envelope.correlation_id
        if correlation is None:
            raise field_error("correlationId", "a reply names the request it answers")
        ask, sender = self._asked(session, correlation)
        if ask is None or sender is None:
            self._too_late(session, request, correlation, now_ms)
            raise HubError("unknown_correlation", "no open request of this id was delivered here")
        final = request.payload.truth("final") is not False
        ok = request.payload.truth("ok") is not False
        if not final:
            ask.partials += 1
            if ask.partials > PARTIAL_REPLIES_MAX:
                raise HubError(
                    "invalid_request", f"at most {PARTIAL_REPLIES_MAX} partial replies", {"field": "final"}
                )
        body: dict[str, Any] = {"ok": ok}
        raw = request.payload.raw
        if ok:
            body["data"] = raw.get("data", Raw(b"null"))
        else:
            body["error"] = raw.get("error", Raw(b"null"))
        body["final"] = final
        metadata = requests.append_metadata(
            requests.forwarded_metadata(request),
            b'"via":%b,"originalMessageId":%b' % (self._hub.via, msgspec.json.encode(ask.request_id)),
        )
        copy = OutgoingMessage(
            new_id(now_ms),
            sender,
            f"@({ask.asker_path})",
            "hub:reply",
            msgspec.json.encode(body),
            now_ms,
            metadata,
            correlation_id=ask.request_id,
        )
        self._hub.count("messages", "reply/ok")
        self._hub.trace.note("replied", copy, now_ms, kind="reply", stream=ask.stream, offset=ask.offset)
        self._send_reply(ask, copy, final=final, now_ms=now_ms)

    def _asked(self, session: Session, correlation: str) -> tuple[PendingRequest, Sender] | tuple[None, None]:
        """The request that a session may reply to, and as whom."""
        found = self._by_copy.get(correlation)
        candidates = [found] if found is not None else list(self._by_request.get(correlation, {}).values())
        for ask in candidates:
            sender = stamp_reply(session, ask.recipient, ask.recipient_session)
            if ask.expects_reply and sender is not None:
                return ask, sender
        return None, None

    def _send_reply(self, ask: PendingRequest, copy: OutgoingMessage, *, final: bool, now_ms: int) -> None:
        hub = self._hub
        asker = ask.asker
        if asker is None or not asker.alive:
            online = hub.registry.find(ask.asker_path, now_ms)
            asker = None if online is None else online.session
        if asker is not None and (asker.alive or asker.answer is not None):
            frame = copy.frame()
            if ask.seen is not None:
                ask.seen[0].answer(ask.seen[1], frame, final=final)
            hub.control(asker, frame)
        elif hub.mailboxes.has(ask.asker_path):
            hub.mailboxes.store(ask.asker_path, copy, None, now_ms)
        else:
            hub.dead.write("late_reply", copy, now_ms)
        if final:
            ask.expects_reply = False
            if not ask.levels:
                ask.expects_reply = True  # it was one: what comes after it is late
                self._end(ask)

    def _too_late(self, session: Session, request: HubRequest, correlation: str, now_ms: int) -> None:
        closed = self._closed.get(correlation)
        sender = None if closed is None else stamp_reply(session, closed[2], None)
        if closed is None or sender is None:
            return
        asker, request_id, _ = closed
        copy = OutgoingMessage(
            new_id(now_ms),
            sender,
            f"@({asker})",
            "hub:reply",
            bytes(request.envelope.payload),
            now_ms,
            requests.append_metadata(
                requests.forwarded_metadata(request),
                b'"originalMessageId":' + msgspec.json.encode(request_id),
            ),
            correlation_id=request_id,
        )
        self._hub.dead.write("late_reply", copy, now_ms)

    # -- time and ends ---------------------------------------------------------------------------------

    def moved(self, old: Session, session: Session) -> None:
        """A session goes on over another connection."""
        for copy_id in old.asked:
            if (ask := self._by_copy.get(copy_id)) is not None:
                ask.asker = session
        for copy_id in old.owner_of:
            if (ask := self._by_copy.get(copy_id)) is not None:
                ask.recipient_session = session
        session.asked, old.asked = old.asked, {}
        session.owner_of, old.owner_of = old.owner_of, {}

    def tick(self, now_ms: int) -> None:
        for ask in self.deadlines.take_due(now_ms):
            self.failed(ask, _timeout_error(ask, None), now_ms)

    def _orphaned(self, ask: PendingRequest) -> None:
        """Whoever asked is away: it may ask again under the same id, or find the reply in its mailbox."""
        self._orphans[ask.copy_id] = None
        if len(self._orphans) > ORPHANED_REQUESTS_MAX:
            oldest = self._by_copy.get(self._orphans.popitem(last=False)[0])
            if oldest is not None:
                self._end(oldest)  # what is in the log says enough to begin it again when it is handed over

    def session_ended(self, session: Session, now_ms: int) -> None:
        """Nobody waits for its asks any more; what it was asked and is kept nowhere gets no answer."""
        for copy_id in tuple(session.owner_of):
            ask = self._by_copy.get(copy_id)
            if ask is None:
                continue
            if ask.stream is None:
                self.failed(ask, _timeout_error(ask, "recipient_left"), now_ms)
            else:
                ask.recipient_session = None
        session.owner_of.clear()
        for copy_id in tuple(session.asked):
            ask = self._by_copy.get(copy_id)
            if ask is None:
                continue
            if ask.expects_reply and ask.stream is not None:
                ask.asker, ask.levels = None, []  # the reply goes to the mailbox of whoever asked
                self._orphaned(ask)
            elif ask.expects_reply or ask.seen is None:
                self._end(ask)
            else:
                ask.asker = None  # whoever sends it again hears what became of it
                self._orphaned(ask)
        session.asked.clear()


def _timeout_error(ask: PendingRequest, reason: str | None) -> HubError:
    details: dict[str, object] = {
        "reached": ask.reached,
        "stream": ask.stream,
        "offset": ask.offset,
        "outcome": "unknown",
    }
    if reason is not None:
        details["reason"] = reason
    return HubError("timeout", "the answer did not come in time", details)
