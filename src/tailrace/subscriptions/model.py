"""Subscription configuration, state, changes, and their stored form.

Offsets are text here: they compare like positions, and `-1` sorts before all of them. One head per
subscription and one record per link are stored, so that an ack of one stream writes only its link.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.protocol import stream_names
from tailrace.protocol.offsets import START_OFFSET
from tailrace.protocol.stream_names import NamePattern

ID_BYTES_MAX: Final = 256
DESCRIPTION_BYTES_MAX: Final = 4096
URL_BYTES_MAX: Final = 2048
STREAMS_MAX: Final = 10_000

SubscriptionKind = Literal["webhook", "pull-wake"]


class SubscriptionConfig(msgspec.Struct, frozen=True, array_like=True):
    """Normalised: streams sorted and unique, defaults filled in, unused fields of the type left out."""

    type: SubscriptionKind
    pattern: str | None
    streams: tuple[str, ...]
    webhook_url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None

    def hash(self) -> bytes:
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class WebhookTargetBody(msgspec.Struct, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(min_length=1)]


class SubscriptionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A pattern or streams; a webhook or a wake stream, according to the type."""

    type: SubscriptionKind
    pattern: str | None = None
    streams: Annotated[list[str], msgspec.Meta(max_length=STREAMS_MAX)] = msgspec.field(
        default_factory=list[str]
    )
    webhook: WebhookTargetBody | None = None
    wake_stream: str | None = None
    lease_ttl_ms: int | None = None
    description: str | None = None


class StreamNames(msgspec.Struct, forbid_unknown_fields=True):
    streams: Annotated[list[str], msgspec.Meta(min_length=1, max_length=STREAMS_MAX)]


_decode_config = msgspec.json.Decoder(SubscriptionRequest).decode
_decode_streams = msgspec.json.Decoder(StreamNames).decode


def invalid_subscription(reason: str) -> TailraceError:
    return TailraceError("INVALID_REQUEST", reason)


def parse_config(body: bytes, limits: Limits) -> SubscriptionConfig:
    """The configuration in a PUT body. `ssrf.check_url` checks the webhook URL."""
    try:
        request = _decode_config(body)
    except msgspec.DecodeError as error:
        raise invalid_subscription(f"invalid subscription: {error}") from None
    if request.pattern is None and not request.streams:
        raise invalid_subscription("a subscription needs a pattern or streams")
    if request.pattern is not None:
        check_pattern(request.pattern, limits)
    lease_ttl_ms = limits.lease_default_ms if request.lease_ttl_ms is None else request.lease_ttl_ms
    if not limits.lease_min_ms <= lease_ttl_ms <= limits.lease_max_ms:
        raise invalid_subscription(f"lease_ttl_ms must be {limits.lease_min_ms} to {limits.lease_max_ms}")
    if request.description is not None and len(request.description.encode()) > DESCRIPTION_BYTES_MAX:
        raise invalid_subscription(f"description must have at most {DESCRIPTION_BYTES_MAX} bytes")
    url = wake_stream = None
    if request.type == "webhook":
        if request.webhook is None:
            raise invalid_subscription("a webhook subscription needs webhook.url")
        url = request.webhook.url
        if len(url.encode()) > URL_BYTES_MAX:
            raise invalid_subscription(f"webhook.url must have at most {URL_BYTES_MAX} bytes")
    else:
        if request.wake_stream is None:
            raise invalid_subscription("a pull-wake subscription needs a wake_stream")
        wake_stream = check_stream(request.wake_stream, limits)
        if stream_names.is_system_name(wake_stream) or wake_stream.startswith("hub/"):
            raise invalid_subscription("wake_stream must not be a system or hub stream")
    return SubscriptionConfig(
        type=request.type,
        pattern=request.pattern,
        streams=normalise_streams(request.streams, limits),
        webhook_url=url,
        wake_stream=wake_stream,
        lease_ttl_ms=lease_ttl_ms,
        description=request.description,
    )


def parse_streams(body: bytes, limits: Limits) -> tuple[str, ...]:
    """The names in the body of POST .../streams."""
    try:
        request = _decode_streams(body)
    except msgspec.DecodeError as error:
        raise invalid_subscription(f"invalid list of streams: {error}") from None
    return normalise_streams(request.streams, limits)


def normalise_streams(names: list[str], limits: Limits) -> tuple[str, ...]:
    return tuple(sorted({check_stream(name, limits) for name in names}))


def check_stream(name: str, limits: Limits) -> str:
    """Accept any valid name, including system streams, which are linked only by name."""
    if not stream_names.is_valid_name(name, limits.name_bytes):
        raise invalid_subscription(f"{name[:100]!r} is not a stream name")
    return name


def check_id(subscription_id: str) -> str:
    """Check that the id is one path segment without control characters."""
    if len(subscription_id.encode()) > ID_BYTES_MAX or "/" in subscription_id:
        raise invalid_subscription(
            f"a subscription id must be one path segment of at most {ID_BYTES_MAX} bytes"
        )
    if not stream_names.is_valid_name(subscription_id, ID_BYTES_MAX):
        raise invalid_subscription("a subscription id must not have control characters or be '.' or '..'")
    return subscription_id


def check_pattern(pattern: str, limits: Limits) -> None:
    if not stream_names.is_valid_name(pattern, limits.name_bytes):
        raise invalid_subscription(
            "a pattern must have the form of a stream name; * matches one segment, ** any number"
        )


BEFORE_FIRST: Final = "-1"

HEAD_PREFIX: Final = "subscription/"
LINK_PREFIX: Final = "subscription-link/"


class StreamLink(msgspec.Struct, frozen=True, array_like=True):
    """A stream that a subscription follows. Entries up to and including `acked` are processed."""

    acked: str
    explicit: bool
    glob: bool

    @property
    def kind(self) -> str:
        return "explicit" if self.explicit else "glob"


class Wake(msgspec.Struct, frozen=True, array_like=True):
    """A unit of work, offered or claimed. There is at most one per subscription."""

    id: str
    generation: int
    tails: dict[str, str]  # pending when it was issued: stream -> tail
    lease_until_ms: int | None = None  # None while a pull wake is unclaimed
    holder: str | None = None
    # Webhooks: failed deliveries, and when the next one is due (None once one was accepted).
    failures: int = 0
    attempt_at_ms: int | None = None


class SubscriptionHead(msgspec.Struct, frozen=True, array_like=True):
    """A subscription without its links. Without a configuration it is the tombstone of a deleted one."""

    config: SubscriptionConfig | None
    created_ms: int
    generation: int
    wake: Wake | None = None
    deleted_ms: int | None = None
    base_url: str = ""  # by which its creator reached the server; callbacks go there


class SetHead(msgspec.Struct, frozen=True):
    head: SubscriptionHead


class SetLink(msgspec.Struct, frozen=True):
    path: str
    link: StreamLink


class DropLink(msgspec.Struct, frozen=True):
    path: str


Change = SetHead | SetLink | DropLink


class Subscription:
    """The state in memory. Only `apply` changes it; `observe` records tails from the log."""

    __slots__ = ("delivering", "head", "id", "links", "pattern", "pending")

    def __init__(self, subscription_id: str, head: SubscriptionHead) -> None:
        self.id = subscription_id
        self.head = head
        self.links: dict[str, StreamLink] = {}
        # Tails beyond their cursor, in the order in which they became so. The tail of other links is their
        # cursor.
        self.pending: dict[str, str] = {}
        # Generation whose POST is running: its response decides, so the lease does not expire meanwhile.
        self.delivering: int | None = None
        self.pattern = _pattern_of(head)

    @property
    def config(self) -> SubscriptionConfig:
        assert self.head.config is not None, "a deleted subscription has no configuration"
        return self.head.config

    @property
    def wake(self) -> Wake | None:
        return self.head.wake

    @property
    def deleted(self) -> bool:
        return self.head.config is None

    def apply(self, change: Change) -> None:
        if isinstance(change, SetHead):
            assert change.head.generation >= self.head.generation, "generations never go back"
            self.head = change.head
            self.pattern = _pattern_of(change.head)
        elif isinstance(change, SetLink):
            self.links[change.path] = change.link
            tail = self.pending.get(change.path)
            if tail is not None and tail <= change.link.acked:
                del self.pending[change.path]
        else:
            self.links.pop(change.path, None)
            self.pending.pop(change.path, None)

    def observe(self, path: str, tail: str | None) -> None:
        """Record the tail of a linked stream; None if the stream does not exist."""
        link = self.links.get(path)
        if link is None:
            return
        if tail is not None and tail > link.acked:
            self.pending[path] = tail
        else:
            self.pending.pop(path, None)

    def tail_of(self, path: str) -> str:
        return self.pending.get(path) or self.links[path].acked

    def wants(self, path: str) -> bool:
        """Whether the pattern matches this stream. The wake stream never matches."""
        return self.pattern is not None and path != self.config.wake_stream and self.pattern.matches(path)


def _pattern_of(head: SubscriptionHead) -> NamePattern | None:
    return None if head.config is None or head.config.pattern is None else NamePattern(head.config.pattern)


def first_cursor(tail: str, *, empty: bool) -> str:
    """The cursor of a stream created after the subscription: before its first entry."""
    return tail if empty else START_OFFSET


# -- stored form ------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_decode_head = msgspec.msgpack.Decoder(SubscriptionHead).decode
_decode_link = msgspec.msgpack.Decoder(StreamLink).decode


def encode_changes(subscription_id: str, changes: Iterable[Change]) -> list[tuple[str, bytes | None]]:
    """The key-value records that make changes durable; a value of None removes the key."""
    records: dict[str, bytes | None] = {}
    for change in changes:
        if isinstance(change, SetHead):
            records[HEAD_PREFIX + subscription_id] = _encoder.encode(change.head)
        else:
            value = _encoder.encode(change.link) if isinstance(change, SetLink) else None
            records[link_key(subscription_id, change.path)] = value
    return list(records.items())


def link_key(subscription_id: str, path: str) -> str:
    return f"{LINK_PREFIX}{subscription_id}/{path}"


def decode_subscriptions(records: Iterable[tuple[str, bytes]]) -> tuple[dict[str, Subscription], list[str]]:
    """Subscriptions and tombstones from all key-value records; other records are skipped.

    Also returns the keys of orphaned links: many links are saved in several transactions, before the head
    when a subscription is created, after it when it is deleted, and a crash in between leaves some behind.
    """
    found: dict[str, Subscription] = {}
    orphans: list[str] = []
    links: list[tuple[str, str, StreamLink]] = []
    for key, value in records:
        if key.startswith(HEAD_PREFIX):
            subscription_id = key[len(HEAD_PREFIX) :]
            found[subscription_id] = Subscription(subscription_id, _decode_head(value))
        elif key.startswith(LINK_PREFIX):
            subscription_id, _, path = key[len(LINK_PREFIX) :].partition("/")
            links.append((subscription_id, path, _decode_link(value)))
    for subscription_id, path, link in links:
        owner = found.get(subscription_id)
        if owner is None or owner.deleted:
            orphans.append(link_key(subscription_id, path))
        else:
            owner.apply(SetLink(path, link))
    return found, orphans
