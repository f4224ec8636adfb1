"""The state of one hub, and how decisions send replies, errors, notices and records.

Runs on the event loop thread. Methods take the time as an argument and queue effects; none waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from tailrace.auth import Identity
from tailrace.common.limits import Limits
from tailrace.hub import requests
from tailrace.hub.addresses import AddressPattern
from tailrace.hub.broadcast import BroadcastBatching
from tailrace.hub.dead_letters import DeadLetters, EntryDeadLetters
from tailrace.hub.deduplication import SeenMemory, SeenMessage, SeenMessages
from tailrace.hub.effects import Append, AppendOutcome, Close, Effect, Send
from tailrace.hub.envelope import HUB_ADDRESS, new_id
from tailrace.hub.errors import DeniedError, HubError, encode_error
from tailrace.hub.flow_control import SLOW_CONSUMER, FlowControl
from tailrace.hub.mailboxes import Mailboxes
from tailrace.hub.pending_requests import PendingRequests
from tailrace.hub.policy import Policy, RateLimiter
from tailrace.hub.registry import PresenceWatches, Registry
from tailrace.hub.sender_identity import encode_hub_message, hub_sender
from tailrace.hub.session import CONNECTED, DISCONNECTED, DISCONNECTING, Session
from tailrace.hub.signatures import SignatureKey
from tailrace.hub.sweep import HubSweep
from tailrace.hub.topics import Topics
from tailrace.hub.trace import MessageTrace

if TYPE_CHECKING:
    from tailrace.hub.requests import HubRequest

HUB_ADDRESS_ALIASES: Final = ("@(tailrace/hub)", "@(signal-hub)")
AUDIT_STREAM: Final = "hub/audit"
OVER_LIMIT_MESSAGES_MAX: Final = 64
CLOSE_SLOW_CONSUMER: Final = 1013


class HubStreams(Protocol):
    """Stream metadata that decisions read without waiting."""

    def tail(self, stream: str) -> int | None:
        """The last durable entry; None if there is no such stream."""
        ...

    def earliest(self, stream: str) -> int: ...
    def created_ms(self, stream: str) -> int: ...
    def size_bytes(self, stream: str) -> int: ...
    def offset(self, stream: str, entry: int) -> str: ...
    def resolve(self, stream: str, offset: str) -> int:
        """The entry of an offset; raises TailraceError."""
        ...


class HubOptions(msgspec.Struct, frozen=True):
    """Options of the hub besides its limits."""

    address: str = HUB_ADDRESS
    topics_open: bool = True
    durable_topics: tuple[str, ...] = ()
    trace: str = "durable"  # or off, or all
    signatures_required: bool = False
    mint: Callable[[Identity, int], str] | None = (
        None  # issues a token for an identity, valid for some seconds
    )
    verify: Callable[[str], Identity] | None = None  # None: no authentication
    keys_of: Callable[[str], Sequence[SignatureKey]] | None = None  # signature keys of an identity
    on_bug: Callable[[Exception], None] | None = None
    on_broadcast: Callable[[float], None] | None = None  # called with the duration in seconds


class Hub:
    """All state of one hub; each subject has its own object."""

    def __init__(
        self,
        limits: Limits,
        streams: HubStreams,
        policy: Policy,
        options: HubOptions,
        make_secret: Callable[[], str],
    ) -> None:
        self.limits = limits
        self.streams = streams
        self.policy = policy
        self.options = options
        self.make_secret = make_secret
        self.addresses = frozenset((options.address, *HUB_ADDRESS_ALIASES))
        self.durable_patterns = [AddressPattern(text) for text in options.durable_topics]
        self.effects: list[Effect] = []
        self.sessions: dict[str, Session] = {}
        self.by_identity: dict[str, dict[Session, None]] = {}
        self.by_resume: dict[str, Session] = {}
        self.draining = False
        self.has_unflushed = False  # batched records wait for a flush
        self.counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._seq = 0
        self.sender = hub_sender(options.address)
        self.via = self.sender.quoted
        self.connecting: set[Session] = set()
        self.ready: deque[Session] = deque()  # sessions whose held frames may be processed
        self._seen: dict[str, SeenMessages] = {}
        self.seen_memory = SeenMemory(limits.hub_seen_bytes)
        self.registry = Registry()
        self.trace = MessageTrace(self, options.trace)
        self.rates = RateLimiter(limits, policy)
        self.flow_control = FlowControl(self)
        self.presence = PresenceWatches(self)
        self.broadcasts = BroadcastBatching(self)
        self.dead_letters = DeadLetters(self)
        self.pending = PendingRequests(self)
        self.mailboxes = Mailboxes(self)
        self.entry_dead_letters = EntryDeadLetters(self)
        self.topics = Topics(self)
        self.sweep = HubSweep(self)

    @property
    def is_open(self) -> bool:
        """Whether the server has no authentication."""
        return self.options.verify is None

    def next_seq(self, now_ms: int) -> int:
        """The number of an accepted message; increases across restarts."""
        following, least = self._seq + 1, now_ms << 10
        self._seq = seq = following if following > least else least
        return seq

    def count(self, name: str, label: str = "") -> None:
        self.counts[(name, label)] += 1

    # -- sending ---------------------------------------------------------------------------------------

    def encode(
        self,
        to: str,
        kind: str,
        payload: bytes,
        now_ms: int,
        *,
        correlation_id: str | None = None,
        metadata: bytes = b"{}",
    ) -> bytes:
        """A message of the hub itself."""
        return encode_hub_message(
            self.sender, to, kind, payload, now_ms, new_id(now_ms), correlation_id, metadata
        )

    def answer_repeats(
        self,
        seen: tuple[SeenMessages, SeenMessage],
        frame: bytes,
        session: Session | None,
        *,
        final: bool = True,
    ) -> None:
        """Stores an answer for repeats of its message, and sends it to other sessions that wait for it."""
        for waiter in seen[0].answer(seen[1], frame, final=final):
            if waiter is not session and isinstance(waiter, Session):
                self.send_control(waiter, frame)

    def send_control(self, session: Session, frame: bytes) -> None:
        """Replies, errors and notices are never dropped; a client that reads none of them is disconnected."""
        if session.on_http_answer is not None:
            session.on_http_answer(frame)
            return
        if session.state not in (CONNECTED, "connecting"):
            return
        if session.detached:
            self.flow_control.buffer_for_resume(session, frame)
            return
        limits = self.limits
        outbox, bytes_max, messages_max = (
            session.outbox,
            limits.hub_outbound_bytes,
            limits.hub_outbound_messages,
        )
        if not outbox.is_below(bytes_max, messages_max) and (
            outbox.bytes > bytes_max or outbox.messages > messages_max
        ):
            session.over_limit_messages += 1
            if session.over_limit_messages > OVER_LIMIT_MESSAGES_MAX:
                self.close(session, CLOSE_SLOW_CONSUMER, SLOW_CONSUMER)
                return
        else:
            session.over_limit_messages = 0
        self.send_frame(session, frame)

    def send_frame(self, session: Session, frame: bytes) -> None:
        session.outbox.push(len(frame))
        self.effects.append(Send(session, frame))

    def close(self, session: Session, code: int, reason: str) -> None:
        """Closes the connection. The session ends when the socket is closed."""
        if session.state in (DISCONNECTING, DISCONNECTED):
            return
        session.state = DISCONNECTING
        session.closed_with = code
        self.effects.append(Close(session, code, reason))

    def send_reply(
        self,
        session: Session,
        request: HubRequest,
        kind: str,
        payload: dict[str, Any] | bytes,
        now_ms: int,
        metadata: bytes | None = None,
    ) -> bytes:
        """Sends the correlated reply, and returns it to be stored for repeats."""
        frame = self.encode(
            f"@({request.sender.path or session.path or 'anonymous'})",
            kind,
            payload if isinstance(payload, bytes) else msgspec.json.encode(payload),
            now_ms,
            correlation_id=request.id,
            metadata=requests.trace_metadata(request) if metadata is None else metadata,
        )
        self.send_control(session, frame)
        return frame

    def send_notice(self, session: Session, kind: str, payload: dict[str, Any], now_ms: int) -> None:
        """Sends an unsolicited message."""
        to = f"@({session.path or 'anonymous'})"
        self.send_control(session, self.encode(to, kind, msgspec.json.encode(payload), now_ms))

    def send_error(
        self,
        session: Session,
        error: HubError,
        now_ms: int,
        *,
        request_id: str | None = None,
        trace: bytes = b"{}",
    ) -> bytes:
        """Sends an error with the id of the request."""
        session.errors += 1
        path = session.path or "anonymous"
        frame = self.error_frame(path, error, now_ms, request_id=request_id, trace=trace)
        self.send_control(session, frame)
        return frame

    def error_frame(
        self,
        path: str,
        error: HubError,
        now_ms: int,
        *,
        request_id: str | None = None,
        trace: bytes = b"{}",
    ) -> bytes:
        """Counts and encodes an error."""
        self.count("errors", error.code)
        kind, payload = encode_error(error)
        return self.encode(f"@({path})", kind, payload, now_ms, correlation_id=request_id, metadata=trace)

    def send_request_error(
        self, session: Session, request: HubRequest, error: HubError, now_ms: int
    ) -> bytes:
        return self.send_error(
            session, error, now_ms, request_id=request.id, trace=requests.trace_metadata(request)
        )

    # -- storing ---------------------------------------------------------------------------------------

    def append(self, effect: Append) -> None:
        self.effects.append(effect)

    def audit(
        self, session: Session, event: str, obj: str, result: str, now_ms: int, path: str | None = None
    ) -> None:
        """Appends a record to the audit stream."""
        self.effects.append(Append(AUDIT_STREAM, _audit_record(session, event, obj, result, now_ms, path)))

    def seen_messages_of(self, path: str) -> SeenMessages:
        """The recent messages of an identity."""
        found = self._seen.get(path)
        if found is None:
            limits = self.limits
            ttl_ms = 300_000 if self.options.signatures_required else limits.hub_seen_ttl_ms
            found = self._seen[path] = SeenMessages(
                entries_max=limits.hub_seen_ids,
                answer_bytes_max=limits.hub_seen_answer_bytes,
                ttl_ms=ttl_ms,
                memory=self.seen_memory,
            )
        return found

    @property
    def senders(self) -> Iterable[str]:
        """Identities with recent messages."""
        return self._seen

    def expire_seen(self, path: str, now_ms: int) -> None:
        """Removes expired messages of an identity, and then the identity."""
        found = self._seen.get(path)
        if found is not None:
            found.expire(now_ms)
            if not len(found) and found.floor_ms < 0:
                del self._seen[path]

    def resume_frames(self, session: Session, now_ms: int) -> None:
        """Processes held frames of a session after this decision."""
        self.ready.append(session)

    # -- identity --------------------------------------------------------------------------------------

    def add_identity(self, session: Session) -> None:
        self.by_identity.setdefault(session.path, {})[session] = None

    def remove_identity(self, session: Session) -> None:
        held = self.by_identity.get(session.path)
        if held is not None and held.pop(session, held) is None and not held:
            del self.by_identity[session.path]

    def denied(self, session: Session, action: str, reason: str, obj: str, now_ms: int) -> DeniedError:
        """An error for a policy denial, with its audit record."""
        details = {"action": action, "reason": reason, "errorCode": "PERMISSION_DENIED"}
        record = _audit_record(session, "denied", obj, action, now_ms)
        return DeniedError(f"{action}: {reason}", details, record)

    def send_denied(self, session: Session, request: HubRequest, error: DeniedError) -> None:
        """Sends the denial after its audit record was appended, or could not be."""

        def recorded(_: AppendOutcome, now_ms: int) -> None:
            self.send_request_error(session, request, error, now_ms)

        self.append(Append(AUDIT_STREAM, error.record, recorded))


def _audit_record(
    session: Session, event: str, obj: str, result: str, now_ms: int, path: str | None = None
) -> bytes:
    return msgspec.json.encode(
        {
            "at": now_ms,
            "event": event,
            "identity": f"@({path or session.path})" if path or session.path else None,
            "session": session.id,
            "remote": session.peer,
            "object": obj,
            "result": result,
        }
    )
