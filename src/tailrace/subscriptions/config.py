"""A subscription's configuration: parsed, normalised, compared by hash."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.protocol import stream_names

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
