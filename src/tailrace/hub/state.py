"""The state of one hub, and the few ways in which a decision speaks: replies, errors, deliveries, entries.

Everything here runs on the loop thread, takes the time as an argument and asks for effects; nothing waits.
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
from tailrace.hub.dead_letters import DeadLetters, RejectedMessages
from tailrace.hub.deduplication import SeenMemory, SeenMessages
from tailrace.hub.effects import Append, AppendOutcome, Close, Effect, Send
from tailrace.hub.envelope import HUB_ADDRESS, new_id
from tailrace.hub.errors import DeniedError, HubError, encode_error
from tailrace.hub.flow_control import FlowControl
from tailrace.hub.mailboxes import Mailboxes
from tailrace.hub.pending_requests import PendingRequests
from tailrace.hub.policy import Policy, RateLimiter
from tailrace.hub.registry import PresenceWatches, Registry
from tailrace.hub.sender import encode_hub_message, hub_sender
from tailrace.hub.session import CONNECTED, DISCONNECTED, DISCONNECTING, Session
from tailrace.hub.signatures import SignatureKey
from tailrace.hub.sweep import HubSweep
from tailrace.hub.topics import Topics
from tailrace.hub.trace import MessageTrace

if TYPE_CHECKING:
    from tailrace.hub.requests import HubRequest

HUB_ADDRESS_ALIASES: Final = ("@(tailrace/hub)", "@(signal-hub)")
AUDIT_STREAM: Final = "hub/audit"
RESERVE_MESSAGES: Final = 64
CLOSE_SLOW_CONSUMER: Final = 1013


class HubStreams(Protocol):
    """What decisions know of streams without waiting for anything."""

    def tail(self, stream: str) -> int | None:
        """The last entry that is durable; None if there is no such stream."""
        ...

    def earliest(self, stream: str) -> int: ...
    def size_bytes(self, stream: str) -> int: ...
    def offset(self, stream: str, entry: int) -> str: ...
    def resolve(self, stream: str, offset: str) -> int:
        """The entry that an offset stands for, or the refusal."""
        ...


class HubOptions(msgspec.Struct, frozen=True):
    """How the hub is set up, beside its limits."""

    address: str = HUB_ADDRESS
    topics_open: bool = True
    durable_topics: tuple[str, ...] = ()
    trace: str = "durable"  # or off, or all
    signatures_required: bool = False
    mint: Callable[[Identity, int], str] | None = None  # makes a token for an identity, of so many seconds
    verify: Callable[[str], Identity] | None = None  # None: nobody needs a token
    keys_of: Callable[[str], Sequence[SignatureKey]] | None = None  # signature keys of an identity
    on_bug: Callable[[Exception], None] | None = None
    on_broadcast: Callable[[float], None] | None = None  # told how many seconds one took


class Hub:
    """Sessions, registrations, routes. Every room has its own part of it."""

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
        self.has_unflushed = False  # something is written in batches, and somebody has to see to it
        self.counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._seq = 0
        self.sender = hub_sender(options.address)
        self.via = self.sender.quoted
        self.connecting: set[Session] = set()
        self.ready: deque[Session] = deque()  # whose frames had to wait, and need not any more
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
        self.rejected = RejectedMessages(self)
        self.topics = Topics(self)
        self.sweep = HubSweep(self)

    @property
    def is_open(self) -> bool:
        """No authentication on this server."""
        return self.options.verify is None

    def next_seq(self, now_ms: int) -> int:
        """A number for each message that is accepted; it grows over restarts too."""
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

    def send_control(self, session: Session, frame: bytes) -> None:
        """Replies, errors and notices: never dropped, but whoever lets too many lie is sent away."""
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
            if session.over_limit_messages > RESERVE_MESSAGES:
                self.close(session, CLOSE_SLOW_CONSUMER, "the connection takes nothing")
                return
        else:
            session.over_limit_messages = 0
        self.send_frame(session, frame)

    def send_frame(self, session: Session, frame: bytes) -> None:
        session.outbox.push(len(frame))
        self.effects.append(Send(session, frame))

    def close(self, session: Session, code: int, reason: str) -> None:
        """Says goodbye. What the session owned goes when its socket is gone."""
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
        """The answer to a request, correlated; also given back, since it may be asked for again."""
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
        """Something that nobody asked for in particular."""
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
        """Exactly one error with the request's id."""
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
        """An error for this address, counted."""
        self.count("errors", error.code)
        kind, payload = encode_error(error)
        return self.encode(f"@({path})", kind, payload, now_ms, correlation_id=request_id, metadata=trace)

    def send_request_error(
        self, session: Session, request: HubRequest, error: HubError, now_ms: int
    ) -> bytes:
        return self.send_error(
            session, error, now_ms, request_id=request.id, trace=requests.trace_metadata(request)
        )

    # -- keeping ---------------------------------------------------------------------------------------

    def append(self, effect: Append) -> None:
        self.effects.append(effect)

    def audit(
        self, session: Session, event: str, obj: str, result: str, now_ms: int, path: str | None = None
    ) -> None:
        """Who did what to whom, for operators."""
        self.effects.append(Append(AUDIT_STREAM, _audit_record(session, event, obj, result, now_ms, path)))

    def seen_messages_of(self, path: str) -> SeenMessages:
        """What an identity has sent lately."""
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
        """Identities of which it is known what they sent lately."""
        return self._seen

    def expire_seen(self, path: str, now_ms: int) -> None:
        """An identity that sent nothing for a while costs nothing."""
        found = self._seen.get(path)
        if found is not None:
            found.expire(now_ms)
            if not len(found) and found.floor_ms < 0:
                del self._seen[path]

    def resume_frames(self, session: Session, now_ms: int) -> None:
        """Frames of a session that waited for its broadcast are looked at next."""
        self.ready.append(session)

    # -- who -------------------------------------------------------------------------------------------

    def add_identity(self, session: Session) -> None:
        self.by_identity.setdefault(session.path, {})[session] = None

    def remove_identity(self, session: Session) -> None:
        held = self.by_identity.get(session.path)
        if held is not None and held.pop(session, held) is None and not held:
            del self.by_identity[session.path]

    def denied(self, session: Session, action: str, reason: str, obj: str, now_ms: int) -> DeniedError:
        """A refusal by the rules; failed attempts are audited."""
        details = {"action": action, "reason": reason, "errorCode": "PERMISSION_DENIED"}
        record = _audit_record(session, "denied", obj, action, now_ms)
        return DeniedError(f"{action}: {reason}", details, record)

    def send_denied(self, session: Session, request: HubRequest, error: DeniedError) -> None:
        """Told when it is in the audit, or cannot be: nobody goes on from an attempt that left no trace."""

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
