"""Requests that wait for an acknowledgement or a reply, with their deadlines.

Each pending request gets one outcome per acknowledgement level, and one final outcome.
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
from tailrace.hub.sender_identity import Sender, stamp_reply
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.requests import HubRequest
    from tailrace.hub.state import Hub


SECOND_MS: Final = 1000


class RequestDeadlines:
    """Pending requests by the second of their deadline, so that a completed one is removed at once.

    A heap would hold each until its deadline: at ten thousand per second, hundreds of thousands.
    """

    __slots__ = ("_by_second", "_seconds")

    def __init__(self) -> None:
        self._by_second: dict[int, dict[str, PendingRequest]] = {}  # by message id
        self._seconds: list[int] = []  # a heap of its keys

    def __len__(self) -> int:
        return sum(map(len, self._by_second.values()))

    def add(self, pending: PendingRequest) -> None:
        second = pending.deadline_ms // SECOND_MS
        found = self._by_second.get(second)
        if found is None:
            found = self._by_second[second] = {}
            heapq.heappush(self._seconds, second)
        found[pending.message_id] = pending

    def remove(self, pending: PendingRequest) -> None:
        found = self._by_second.get(pending.deadline_ms // SECOND_MS)
        if found is not None:
            found.pop(pending.message_id, None)

    def pop_due(self, now_ms: int) -> list[PendingRequest]:
        """Requests past their deadline, in order."""
        due: list[PendingRequest] = []
        while self._seconds and self._seconds[0] <= now_ms // SECOND_MS:
            second = self._seconds[0]
            found = self._by_second[second]
            due += sorted(
                (pending for pending in found.values() if pending.deadline_ms <= now_ms),
                key=lambda pending: pending.deadline_ms,
            )
            if second == now_ms // SECOND_MS:
                break  # the second is not over
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
    """A request that lacks an acknowledgement or a reply."""

    request_id: str
    requester: Session | None
    requester_path: str
    recipient: str
    deadline_ms: int
    levels: list[str]
    expects_reply: bool
    trace: bytes
    message_id: str = ""
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
    def reply_metadata(self) -> bytes:
        """Metadata of a publication that expects a reply."""
        return b',"originalMessageId":%b,"replyBy":%d' % (_quoted(self.request_id), self.deadline_ms)


class PendingRequests:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._by_copy: dict[str, PendingRequest] = {}
        # Those that expect a reply, by request id, then by message id.
        self._by_request: dict[str, dict[str, PendingRequest]] = {}
        self._stored: dict[str, dict[int, PendingRequest]] = {}  # by stream and entry
        self.deadlines = RequestDeadlines()
        # Closed requests: distinguishes a late reply, which becomes a dead letter, from a forged one.
        self._closed: OrderedDict[str, tuple[str, str, str]] = OrderedDict()
        self._orphans: OrderedDict[str, None] = OrderedDict()  # stored requests without a connected requester

    def __len__(self) -> int:
        return len(self._by_copy)

    # -- starting --------------------------------------------------------------------------------------

    def check_room(self, session: Session) -> None:
        if len(session.sent_requests) >= self._hub.limits.hub_session_asks:
            details = {"retryAfter": 1000, "kind": "ask", "reason": "open_asks"}
            raise HubError(
                "rate_limited",
                f"at most {self._hub.limits.hub_session_asks} open requests per session",
                details,
            )

    def begin(self, pending: PendingRequest) -> None:
        """Starts the deadline."""
        self._by_copy[pending.message_id] = pending
        if pending.expects_reply:
            self._by_request.setdefault(pending.request_id, {})[pending.message_id] = pending
        if pending.requester is not None:
            pending.requester.sent_requests[pending.message_id] = None
        if pending.recipient_session is not None:
            pending.recipient_session.received_requests[pending.message_id] = None
        self.deadlines.add(pending)

    def rebuild(
        self, copy: OutgoingMessage, recipient: str, stream: str, entry: int, offset: str, now_ms: int
    ) -> PendingRequest | None:
        """A request that was stored before a restart."""
        metadata = requests.parse_metadata(copy)
        original, by = metadata.get("originalMessageId"), metadata.get("replyBy")
        if copy.pattern != "ask" or original is None or by is None or int(bytes(by)) <= now_ms:
            return None
        pending = PendingRequest(
            msgspec.json.decode(original, type=str),
            None,
            copy.sender.path,
            recipient,
            int(bytes(by)),
            [],
            True,
            b"{}",
            message_id=copy.id,
            reached="accepted",
            stream=stream,
            entry=entry,
            offset=offset,
        )
        self.begin(pending)
        self._stored.setdefault(stream, {})[entry] = pending
        self._orphaned(pending)
        return pending

    def reattach(self, request_id: str, sender: str, session: Session) -> bool:
        """Attaches a repeated request to the pending one of the same sender that lost its session."""
        for pending in self._by_request.get(request_id, {}).values():
            if pending.requester is None and pending.requester_path == sender:
                pending.requester = session
                session.sent_requests[pending.message_id] = None
                self._orphans.pop(pending.message_id, None)
                return True
        return False

    def sent_to(self, pending: PendingRequest, session: Session) -> None:
        pending.recipient_session = session
        session.received_requests[pending.message_id] = None

    def _end(self, pending: PendingRequest) -> None:
        if pending.done:
            return
        pending.done = True
        self._by_copy.pop(pending.message_id, None)
        self.deadlines.remove(pending)
        self._orphans.pop(pending.message_id, None)
        same = self._by_request.get(pending.request_id)
        if same is not None:
            same.pop(pending.message_id, None)
            if not same:
                del self._by_request[pending.request_id]
        if pending.stream is not None and (waiting := self._stored.get(pending.stream)) is not None:
            waiting.pop(pending.entry, None)
            if not waiting:
                del self._stored[pending.stream]
        if pending.requester is not None:
            pending.requester.sent_requests.pop(pending.message_id, None)
        if pending.recipient_session is not None:
            pending.recipient_session.received_requests.pop(pending.message_id, None)
        if pending.expects_reply:
            self._closed[pending.message_id] = (pending.requester_path, pending.request_id, pending.recipient)
            if len(self._closed) > CLOSED_REQUESTS_MAX:
                self._closed.popitem(last=False)
        if pending.seen is not None and not pending.seen[1].finished:
            pending.seen[1].finished = True

    # -- levels ----------------------------------------------------------------------------------------

    def on_stored(
        self,
        pending: PendingRequest,
        stream: str,
        entry: int,
        offset: str | None,
        *,
        online: bool,
        now_ms: int,
    ) -> None:
        """The message is durable."""
        pending.stream, pending.entry, pending.offset, pending.reached = stream, entry, offset, "accepted"
        if pending.done:
            return
        if entry:
            self._stored.setdefault(stream, {})[entry] = pending
        if "accepted" in pending.levels:
            self._ack(pending, "accepted", "accepted", "accepted", now_ms)
        if "delivered" in pending.levels and not online:
            self._ack(pending, "delivered", "queued", "accepted", now_ms)

    def on_delivered(
        self, pending: PendingRequest, now_ms: int, *, waits: bool = False, processed: bool = False
    ) -> None:
        """The message was sent to the recipient's connection, or buffered until it resumes."""
        if "delivered" in pending.levels:
            status = "queued" if waits else "delivered"
            self._ack(
                pending, "delivered", status, "accepted" if waits and pending.stream else "delivered", now_ms
            )
        if processed and "processed" in pending.levels:
            self._ack(pending, "processed", "processed", "delivered", now_ms)
        if pending.reached is None or pending.reached == "accepted":
            pending.reached = "delivered"

    def stored_at(self, stream: str, entry: int, recipient: str) -> PendingRequest | None:
        """The pending request of an entry, if this is its recipient."""
        waiting = self._stored.get(stream)
        found = None if waiting is None else waiting.get(entry)
        return found if found is not None and found.recipient == recipient else None

    def on_committed(self, stream: str, upto: int, now_ms: int) -> None:
        """A recipient has committed entries up to `upto`."""
        waiting = self._stored.get(stream)
        if not waiting:
            return
        for entry in sorted(entry for entry in waiting if entry <= upto):
            pending = waiting[entry]
            if "delivered" in pending.levels:
                self._ack(pending, "delivered", "delivered", "delivered", now_ms)
            if "processed" in pending.levels:
                self._ack(pending, "processed", "processed", "processed", now_ms)

    def fail(self, pending: PendingRequest, error: HubError, now_ms: int) -> None:
        """Sends an error for every outcome that is left."""
        if pending.done:
            return
        levels = max(1, len(pending.levels) + pending.expects_reply)
        pending.levels, pending.expects_reply = [], False
        for place in range(levels):
            self._send_to_waiters(
                pending, self._error_frame(pending, error, now_ms), final=place == levels - 1
            )
        self._end(pending)

    def on_response(self, pending: PendingRequest, frame: bytes) -> None:
        """All levels are reached; `frame` is the final acknowledgement."""
        if not pending.done:
            pending.levels.clear()
            self._send_to_waiters(pending, frame, final=True)
            self._end(pending)

    def _ack(self, pending: PendingRequest, wanted: str, status: str, level: str, now_ms: int) -> None:
        pending.levels.remove(wanted)
        payload = (
            b'{"messageId":%b,"deliveredAt":%d,"status":"%b","level":"%b","stream":%b,"offset":%b,"duplicate":%b}'
            % (
                _quoted(pending.request_id),
                now_ms,
                status.encode(),
                level.encode(),
                b"null" if pending.stream is None else _quoted(pending.stream),
                b"null" if pending.offset is None else b'"%b"' % pending.offset.encode(),
                b"true" if pending.duplicate else b"false",
            )
        )
        frame = self._frame(pending, "hub:delivery_ack", payload, now_ms)
        self._send_to_waiters(pending, frame, final=not pending.open)
        if not pending.open:
            self._end(pending)

    def _frame(self, pending: PendingRequest, kind: str, payload: bytes, now_ms: int) -> bytes:
        return self._hub.encode(
            f"@({pending.requester_path})",
            kind,
            payload,
            now_ms,
            correlation_id=pending.request_id,
            metadata=pending.trace,
        )

    def _error_frame(self, pending: PendingRequest, error: HubError, now_ms: int) -> bytes:
        return self._hub.error_frame(
            pending.requester_path, error, now_ms, request_id=pending.request_id, trace=pending.trace
        )

    def _send_to_waiters(self, pending: PendingRequest, frame: bytes, *, final: bool) -> None:
        """Sends to the requester, and to sessions that repeated the request."""
        if pending.requester is not None:
            self._hub.send_control(pending.requester, frame)
        if pending.seen is not None:
            self._hub.answer_repeats(pending.seen, frame, pending.requester, final=final)

    # -- replies ---------------------------------------------------------------------------------------

    def reply(self, session: Session, request: HubRequest, now_ms: int) -> None:
        """An actor's reply. Only the recipient of the request may send it."""
        correlation = request.envelope.correlation_id
        if correlation is None:
            raise field_error("correlationId", "correlationId must be the id of the request")
        pending, sender = self._find_requested(session, correlation)
        if pending is None or sender is None:
            self._dead_letter_late_reply(session, request, correlation, now_ms)
            raise HubError(
                "unknown_correlation", "no open request with this id was delivered to this session"
            )
        final = request.payload.truth("final") is not False
        ok = request.payload.truth("ok") is not False
        if not final:
            pending.partials += 1
            if pending.partials > PARTIAL_REPLIES_MAX:
                raise HubError(
                    "invalid_request",
                    f"a request must have at most {PARTIAL_REPLIES_MAX} partial replies",
                    {"field": "final"},
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
            b'"via":%b,"originalMessageId":%b' % (self._hub.via, msgspec.json.encode(pending.request_id)),
        )
        copy = OutgoingMessage(
            new_id(now_ms),
            sender,
            f"@({pending.requester_path})",
            "hub:reply",
            msgspec.json.encode(body),
            now_ms,
            metadata,
            correlation_id=pending.request_id,
        )
        self._hub.count("messages", "reply/ok")
        self._hub.trace.record(
            "replied", copy, now_ms, kind="reply", stream=pending.stream, offset=pending.offset
        )
        self._send_reply(pending, copy, final=final, now_ms=now_ms)

    def _find_requested(
        self, session: Session, correlation: str
    ) -> tuple[PendingRequest, Sender] | tuple[None, None]:
        """The request that a session may reply to, and the sender of that reply."""
        found = self._by_copy.get(correlation)
        candidates = [found] if found is not None else list(self._by_request.get(correlation, {}).values())
        for pending in candidates:
            sender = stamp_reply(session, pending.recipient, pending.recipient_session)
            if pending.expects_reply and sender is not None:
                return pending, sender
        return None, None

    def _send_reply(
        self, pending: PendingRequest, copy: OutgoingMessage, *, final: bool, now_ms: int
    ) -> None:
        hub = self._hub
        requester = pending.requester
        if requester is None or not requester.alive:
            online = hub.registry.find(pending.requester_path, now_ms)
            requester = None if online is None else online.session
        if requester is not None and (requester.alive or requester.on_http_answer is not None):
            frame = copy.frame()
            if pending.seen is not None:
                pending.seen[0].answer(pending.seen[1], frame, final=final)
            hub.send_control(requester, frame)
        elif hub.mailboxes.has(pending.requester_path):
            hub.mailboxes.store(pending.requester_path, copy, None, now_ms)
        else:
            hub.dead_letters.write("late_reply", copy, now_ms)
        if final:
            pending.expects_reply = False
            if not pending.levels:
                pending.expects_reply = True  # later replies are late, not unknown
                self._end(pending)

    def _dead_letter_late_reply(
        self, session: Session, request: HubRequest, correlation: str, now_ms: int
    ) -> None:
        closed = self._closed.get(correlation)
        sender = None if closed is None else stamp_reply(session, closed[2], None)
        if closed is None or sender is None:
            return
        requester, request_id, _ = closed
        copy = OutgoingMessage(
            new_id(now_ms),
            sender,
            f"@({requester})",
            "hub:reply",
            bytes(request.envelope.payload),
            now_ms,
            requests.append_metadata(
                requests.forwarded_metadata(request),
                b'"originalMessageId":' + msgspec.json.encode(request_id),
            ),
            correlation_id=request_id,
        )
        self._hub.dead_letters.write("late_reply", copy, now_ms)

    # -- time and ends ---------------------------------------------------------------------------------

    def transfer(self, old: Session, session: Session) -> None:
        """Moves the requests of a session to the connection that resumed it."""
        for message_id in old.sent_requests:
            if (pending := self._by_copy.get(message_id)) is not None:
                pending.requester = session
        for message_id in old.received_requests:
            if (pending := self._by_copy.get(message_id)) is not None:
                pending.recipient_session = session
        session.sent_requests, old.sent_requests = old.sent_requests, {}
        session.received_requests, old.received_requests = old.received_requests, {}

    def tick(self, now_ms: int) -> None:
        for pending in self.deadlines.pop_due(now_ms):
            self.fail(pending, _timeout_error(pending, None), now_ms)

    def _orphaned(self, pending: PendingRequest) -> None:
        """The requester is offline: it may repeat the request, or get the reply in its mailbox."""
        self._orphans[pending.message_id] = None
        if len(self._orphans) > ORPHANED_REQUESTS_MAX:
            oldest = self._by_copy.get(self._orphans.popitem(last=False)[0])
            if oldest is not None:
                self._end(oldest)  # rebuilt from the log when it is delivered

    def session_ended(self, session: Session, now_ms: int) -> None:
        """Detaches the session's own requests, and fails unstored ones that it received."""
        for message_id in tuple(session.received_requests):
            pending = self._by_copy.get(message_id)
            if pending is None:
                continue
            if pending.stream is None:
                self.fail(pending, _timeout_error(pending, "recipient_left"), now_ms)
            else:
                pending.recipient_session = None
        session.received_requests.clear()
        for message_id in tuple(session.sent_requests):
            pending = self._by_copy.get(message_id)
            if pending is None:
                continue
            if pending.expects_reply and pending.stream is not None:
                pending.requester, pending.levels = None, []  # the reply goes to the requester's mailbox
                self._orphaned(pending)
            elif pending.expects_reply or pending.seen is None:
                self._end(pending)
            else:
                pending.requester = None  # a repeat gets the outcome
                self._orphaned(pending)
        session.sent_requests.clear()


def _timeout_error(pending: PendingRequest, reason: str | None) -> HubError:
    details: dict[str, object] = {
        "reached": pending.reached,
        "stream": pending.stream,
        "offset": pending.offset,
        "outcome": "unknown",
    }
    if reason is not None:
        details["reason"] = reason
    return HubError("timeout", "no response before the deadline", details)
