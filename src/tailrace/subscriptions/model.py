"""Subscription configuration, state, changes and their stored form.

A subscription's configuration: parsed, normalised, compared by hash.

A subscription's state, the changes it goes through, and their form on disk.

Offsets here are text: they compare like positions, and `-1` sorts before all of them. What is saved is one
head per subscription and one record per link, so that an ack of one stream among many writes that one.
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
    """Normalised: streams sorted and unique, defaults filled in, what the type does not use left out."""

    type: SubscriptionKind
    pattern: str | None
    streams: tuple[str, ...]
    webhook_url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None

    def hash(self) -> bytes:
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class _WebhookBody(msgspec.Struct, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(min_length=1)]


class _ConfigBody(msgspec.Struct, forbid_unknown_fields=True):
    type: SubscriptionKind
    pattern: str | None = None
    streams: Annotated[list[str], msgspec.Meta(max_length=STREAMS_MAX)] = msgspec.field(
        default_factory=list[str]
    )
    webhook: _WebhookBody | None = None
    wake_stream: str | None = None
    lease_ttl_ms: int | None = None
    description: str | None = None


class _StreamsBody(msgspec.Struct, forbid_unknown_fields=True):
    streams: Annotated[list[str], msgspec.Meta(min_length=1, max_length=STREAMS_MAX)]


_decode_config = msgspec.json.Decoder(_ConfigBody).decode
_decode_streams = msgspec.json.Decoder(_StreamsBody).decode


def invalid_subscription(reason: str) -> TailraceError:
    return TailraceError("INVALID_REQUEST", reason)


def parse_config(body: bytes, limits: Limits) -> SubscriptionConfig:
    """The configuration in a PUT body. The webhook's URL is judged by the URL rules, not here."""
    try:
        given = _decode_config(body)
    except msgspec.DecodeError as error:
        raise invalid_subscription(f"not a subscription: {error}") from None
    if given.pattern is None and not given.streams:
        raise invalid_subscription("a subscription needs a pattern or streams")
    if given.pattern is not None:
        check_pattern(given.pattern, limits)
    lease_ttl_ms = limits.lease_default_ms if given.lease_ttl_ms is None else given.lease_ttl_ms
    if not limits.lease_min_ms <= lease_ttl_ms <= limits.lease_max_ms:
        raise invalid_subscription(f"lease_ttl_ms is {limits.lease_min_ms} to {limits.lease_max_ms}")
    if given.description is not None and len(given.description.encode()) > DESCRIPTION_BYTES_MAX:
        raise invalid_subscription(f"the description is longer than {DESCRIPTION_BYTES_MAX} bytes")
    url = wake_stream = None
    if given.type == "webhook":
        if given.webhook is None:
            raise invalid_subscription("a webhook subscription needs webhook.url")
        url = given.webhook.url
        if len(url.encode()) > URL_BYTES_MAX:
            raise invalid_subscription(f"webhook.url is longer than {URL_BYTES_MAX} bytes")
    else:
        if given.wake_stream is None:
            raise invalid_subscription("a pull-wake subscription needs a wake_stream")
        wake_stream = check_stream(given.wake_stream, limits)
        if stream_names.is_system_name(wake_stream) or wake_stream.startswith("hub/"):
            raise invalid_subscription("the wake_stream is an ordinary stream, not one of the server's own")
    return SubscriptionConfig(
        type=given.type,
        pattern=given.pattern,
        streams=normalise_streams(given.streams, limits),
        webhook_url=url,
        wake_stream=wake_stream,
        lease_ttl_ms=lease_ttl_ms,
        description=given.description,
    )


def parse_streams(body: bytes, limits: Limits) -> tuple[str, ...]:
    """The names in the body of POST .../streams."""
    try:
        given = _decode_streams(body)
    except msgspec.DecodeError as error:
        raise invalid_subscription(f"not a list of streams: {error}") from None
    return normalise_streams(given.streams, limits)


def normalise_streams(given: list[str], limits: Limits) -> tuple[str, ...]:
    return tuple(sorted({check_stream(name, limits) for name in given}))


def check_stream(name: str, limits: Limits) -> str:
    """Any name a stream can have, system streams included: those are linked when they are named."""
    if not stream_names.is_valid_name(name, limits.name_bytes):
        raise invalid_subscription(f"{name[:100]!r} is not a stream name")
    return name


def check_id(subscription_id: str) -> str:
    """One path segment that can be told apart in logs and URLs."""
    if len(subscription_id.encode()) > ID_BYTES_MAX or "/" in subscription_id:
        raise invalid_subscription(f"a subscription id is one path segment of at most {ID_BYTES_MAX} bytes")
    if not stream_names.is_valid_name(subscription_id, ID_BYTES_MAX):
        raise invalid_subscription("a subscription id has no control characters and is not '.' or '..'")
    return subscription_id


def check_pattern(pattern: str, limits: Limits) -> None:
    if not stream_names.is_valid_name(pattern, limits.name_bytes):
        raise invalid_subscription(
            "a pattern has the form of a stream name; * stands for one segment, ** for any number"
        )


BEFORE_FIRST: Final = "-1"

HEAD_PREFIX: Final = "subscription/"
LINK_PREFIX: Final = "subscription-link/"


class StreamLink(msgspec.Struct, frozen=True, array_like=True):
    """A stream a subscription follows. `acked` is processed, up to and including."""

    acked: str
    explicit: bool
    glob: bool

    @property
    def kind(self) -> str:
        return "explicit" if self.explicit else "glob"


class Wake(msgspec.Struct, frozen=True, array_like=True):
    """Work handed out, or offered. There is at most one per subscription."""

    id: str
    generation: int
    tails: dict[str, str]  # what was pending when it was issued: stream -> tail
    lease_until_ms: int | None = None  # None while a pull wake waits for somebody to claim it
    holder: str | None = None
    # Webhooks: deliveries that failed, and when the next one is due (None once one was accepted).
    failures: int = 0
    attempt_at_ms: int | None = None


class SubscriptionHead(msgspec.Struct, frozen=True, array_like=True):
    """All of a subscription but its links. Without a configuration it is the tombstone of a deleted one."""

    config: SubscriptionConfig | None
    created_ms: int
    generation: int
    wake: Wake | None = None
    deleted_ms: int | None = None
    base_url: str = ""  # how the client that made it reached the server: callbacks go there


class SetHead(msgspec.Struct, frozen=True):
    head: SubscriptionHead


class SetLink(msgspec.Struct, frozen=True):
    path: str
    link: StreamLink


class DropLink(msgspec.Struct, frozen=True):
    path: str


Change = SetHead | SetLink | DropLink


class Subscription:
    """State in memory. Changes come through `apply` only; `observe` notes what the log says about tails."""

    __slots__ = ("delivering", "head", "id", "links", "pattern", "pending")

    def __init__(self, subscription_id: str, head: SubscriptionHead) -> None:
        self.id = subscription_id
        self.head = head
        self.links: dict[str, StreamLink] = {}
        # Tails past their cursor, in the order in which they became so. Other links' tail is their cursor.
        self.pending: dict[str, str] = {}
        # Generation whose POST is under way: its answer decides, so the lease does not run out meanwhile.
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
        """Takes note of a linked stream's tail; None if the stream does not exist."""
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
        """Whether a stream of this name belongs to the pattern. The wake stream never does."""
        return self.pattern is not None and path != self.config.wake_stream and self.pattern.matches(path)


def _pattern_of(head: SubscriptionHead) -> NamePattern | None:
    return None if head.config is None or head.config.pattern is None else NamePattern(head.config.pattern)


def first_cursor(tail: str, *, empty: bool) -> str:
    """Where a stream that was created after the subscription is linked: before its first content."""
    return tail if empty else START_OFFSET


# -- on disk ----------------------------------------------------------------------------------------------

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
    """Subscriptions, and tombstones, from all key-value records; those of others are passed over.

    Also the keys of links that belong to nothing: many links are saved in several pieces, before the head of
    their subscription when it is made, after it when it is deleted. A crash in between leaves some behind.
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
