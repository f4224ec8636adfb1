"""Messages, actors, acknowledgements and pages of the hub client; address forms of runtimes."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, cast, get_args

import msgspec

from tailrace.client.errors import INVALID_ANSWER, ClientError, check_seconds
from tailrace.hub.addresses import format_address, parse_address
from tailrace.hub.envelope import Envelope

Runtime = Literal["browser", "cloudflare", "local", "seag", "beam"]

# The first prefix is written, all are accepted.
_PREFIXES: Final[dict[Runtime, tuple[str, ...]]] = {
    "browser": ("local://",),
    "cloudflare": ("remote://do/", "remote://worker/", "worker://", "do://"),
    "beam": ("",),
    "local": (),
    "seag": (),
}


def to_runtime(address: str, runtime: Runtime) -> str:
    """A hub address in the form of a runtime: `local://w-1` in a browser for `@(w-1)`."""
    path = parse_address(address, "address")
    prefixes = _PREFIXES[runtime]
    return prefixes[0] + path if prefixes else address


def from_runtime(text: str, runtime: Runtime) -> str:
    """The hub address for that of a runtime. The hub's own form is always accepted."""
    if not text.startswith("@("):
        for prefix in _PREFIXES[runtime]:
            if text.startswith(prefix):
                text = format_address(text.removeprefix(prefix))
                break
    parse_address(text, "address")
    return text


AckLevel = Literal["delivered", "accepted", "processed"]
ACK_LEVELS: Final = get_args(AckLevel)


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long the client waits for each kind of response."""

    connect_s: float = 5.0
    register_s: float = 5.0
    heartbeat_s: float = 10.0
    ask_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "register_s", "heartbeat_s", "ask_s"):
            check_seconds(name, getattr(self, name))


class Message:
    """One received message. `data` is decoded on access."""

    __slots__ = ("_envelope", "_metadata")

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._metadata: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        return self._envelope.id

    @property
    def type(self) -> str:
        return self._envelope.type

    @property
    def sender(self) -> str:
        """The sender's address, verified by the hub."""
        return self._envelope.from_ or ""

    @property
    def to(self) -> str:
        return self._envelope.to or ""

    @property
    def raw(self) -> bytes:
        """The data exactly as the sender wrote it."""
        return bytes(self._envelope.payload)

    @property
    def data(self) -> Any:
        return decode_json(self.raw)

    @property
    def metadata(self) -> dict[str, Any]:
        if self._metadata is None:
            self._metadata = cast("dict[str, Any]", decode_json(bytes(self._envelope.metadata)))
        return self._metadata

    @property
    def correlation_id(self) -> str | None:
        return self._envelope.correlation_id

    @property
    def timestamp(self) -> int:
        """Milliseconds since 1970, by the hub's clock."""
        return self._envelope.timestamp

    @property
    def wants_reply(self) -> bool:
        return self._envelope.pattern == "ask"

    @property
    def topic(self) -> str | None:
        return self.metadata.get("topic")

    @property
    def stream(self) -> str | None:
        """The stream that stores it, if it is stored."""
        return self._mailbox.get("stream")

    @property
    def offset(self) -> str | None:
        """The offset to commit after processing, if it is stored."""
        return self._mailbox.get("offset")

    @property
    def subscription_id(self) -> str | None:
        return self._mailbox.get("subscriptionId")

    @property
    def redelivered(self) -> bool:
        return self.metadata.get("redelivered") is True

    @property
    def size_bytes(self) -> int:
        return len(self._envelope.payload) + len(self._envelope.metadata)

    @property
    def _mailbox(self) -> dict[str, Any]:
        return self.metadata.get("mailbox") or {}

    def __repr__(self) -> str:
        return f"Message({self.type!r}, sender={self.sender!r}, to={self.to!r}, id={self.id!r})"


class Ack(msgspec.Struct, frozen=True, rename="camel"):
    """Delivery state of a message: `sent`, `delivered` or `queued`, `accepted` (durable), `processed`."""

    message_id: str
    status: str
    level: str = ""
    stream: str | None = None
    offset: str | None = None
    duplicate: bool = False
    delivered_at: int | None = None


class Actor(msgspec.Struct, frozen=True, rename="camel"):
    """One registered address."""

    address: str
    capabilities: list[str] = []
    metadata: dict[str, Any] = {}
    expires_at: int | None = None
    registered_at: int | None = None
    connection_id: str | None = None
    version: int = 0
    online: bool = True
    durable: bool = False


class Presence(msgspec.Struct, frozen=True, rename="camel"):
    """An actor `joined`, `left`, `expired` or was `updated`. A watch starts with `joined` for all present."""

    event: str
    actor_address: str
    capabilities: list[str] = []
    version: int = 0
    at: int | None = None  # milliseconds since 1970; None if it was derived from a snapshot


class PresencePage(msgspec.Struct, frozen=True, rename="camel"):
    """The actors that are present when a watch starts."""

    watch_id: str
    actors: list[Actor]
    offset: str
    has_more: bool = False


class ActorPage(msgspec.Struct, frozen=True, rename="camel"):
    actors: list[Actor]
    has_more: bool = False
    cursor: str | None = None


class Published(msgspec.Struct, frozen=True, rename="camel"):
    """How many subscribers got a publication at once, and where it is stored, if it is."""

    topic: str
    subscriber_count: int = 0
    queued_count: int = 0
    stream: str | None = None
    offset: str | None = None


class Broadcast(msgspec.Struct, frozen=True, rename="camel"):
    """The outcome of a broadcast: every recipient is in one of the three counts."""

    message_id: str
    delivered_count: int = 0
    queued_count: int = 0
    failed_count: int = 0
    total: int | None = None


class Subscription(msgspec.Struct, frozen=True, rename="camel"):
    topic: str
    subscription_id: str
    durable: bool = False
    group: str | None = None
    offset: str | None = None


class Registration(msgspec.Struct, frozen=True, rename="camel"):
    """A registered address with its expiry. The client renews it automatically."""

    actor_address: str
    expires_at: int
    renewal_token: str
    version: int = 0
    durable: bool = False
    mailbox: Any = None
    ttl_seconds: float | None = None  # granted, which may differ from the requested one


class MailboxEntry(msgspec.Struct, frozen=True, rename="camel"):
    """One entry of a mailbox."""

    offset: str
    message: Any
    append_time: str | None = None


class MailboxPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of a mailbox. Reading changes nothing; committing an offset does."""

    actor_address: str
    messages: list[MailboxEntry]
    next_offset: str
    committed: str | None = None
    stream: str | None = None
    earliest_offset: str | None = None
    up_to_date: bool = False
    lag: int | None = None


class Committed(msgspec.Struct, frozen=True, rename="camel"):
    actor_address: str
    committed: str
    stream: str | None = None
    lag: int | None = None


class Welcome(msgspec.Struct, frozen=True, rename="camel"):
    """The hub's response to `hub:connect`."""

    session_id: str
    server_version: str = ""
    max_message_size: int = 1024 * 1024
    heartbeat_interval: int = 25_000
    resume_token: str | None = None
    resumed: bool = False


def decode_json(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        # Legal JSON that msgspec rejects: numbers like 1e400, lone surrogates.
        return json.loads(text)


def decode_response(message: Message, kind: Any) -> Any:
    """The payload of a response, decoded as this type."""
    try:
        return msgspec.json.decode(message.raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ClientError(INVALID_ANSWER, f"malformed {message.type} from the hub: {error}") from error
