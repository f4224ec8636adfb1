"""A subscription between the two forms it is kept in: facts of the log, and one object in the bucket.

The facts are MessagePack arrays that the subscriptions write. Their order is part of the format on disk, and
named here once more, because nothing below the subscriptions may import them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from tailrace.storage.hot_store.meta_tables import LINK_PREFIX, SUBSCRIPTION_PREFIX
from tailrace.storage.meta_objects import SubscriptionLink, SubscriptionObject

CONFIG_FIELDS: Final = (
    "type",
    "pattern",
    "streams",
    "webhook_url",
    "wake_stream",
    "lease_ttl_ms",
    "description",
)
SUBSCRIPTION_FIELDS: Final = ("config", "created_ms", "generation", "wake", "deleted_ms", "base_url")
LINK_FIELDS: Final = ("acked", "explicit", "glob")
# Generations handed out and not recorded before a loss must never be handed out again.
GENERATIONS_LOST_MAX: Final = 1_000_000


def subscription_object(subject: str, facts: Mapping[str, bytes], as_of: int) -> SubscriptionObject:
    """The object of a subscription that has facts."""
    subscription_id = subject[len(SUBSCRIPTION_PREFIX) :]
    head = _by_field_name(SUBSCRIPTION_FIELDS, facts[subject])
    config = head["config"]
    links: list[SubscriptionLink] = []
    prefix = f"{LINK_PREFIX}{subscription_id}/"
    for key, value in facts.items():
        if key.startswith(prefix) and config is not None:
            links.append(SubscriptionLink(stream=key[len(prefix) :], **_by_field_name(LINK_FIELDS, value)))
    return SubscriptionObject(
        as_of=as_of,
        id=subscription_id,
        config=None if config is None else dict(zip(CONFIG_FIELDS, config, strict=True)),
        created_ms=head["created_ms"],
        deleted_ms=head["deleted_ms"],
        base_url=head["base_url"] or "",
        wake_generation=head["generation"],
        links=links,
    )


def restored_subscription(
    found: SubscriptionObject, tail_of: Callable[[str], str | None]
) -> SubscriptionObject:
    """The subscription to go on with: cursors are set back to the tails there are, old wakes are void."""
    links: list[SubscriptionLink] = []
    for link in found.links:
        tail = tail_of(link.stream)
        past = tail is not None and link.acked > tail
        links.append(msgspec.structs.replace(link, acked=tail) if past else link)
    return msgspec.structs.replace(
        found, links=links, wake_generation=found.wake_generation + GENERATIONS_LOST_MAX, as_of=0
    )


def subscription_facts(found: SubscriptionObject) -> dict[str, bytes]:
    """The facts of a subscription without a wake under way."""
    config = None if found.config is None else [found.config[name] for name in CONFIG_FIELDS]
    head = [config, found.created_ms, found.wake_generation, None, found.deleted_ms, found.base_url]
    facts = {SUBSCRIPTION_PREFIX + found.id: msgspec.msgpack.encode(head)}
    for link in found.links:
        value = [link.acked, link.explicit, link.glob]
        facts[f"{LINK_PREFIX}{found.id}/{link.stream}"] = msgspec.msgpack.encode(value)
    return facts


def _by_field_name(fields: tuple[str, ...], raw: bytes) -> dict[str, Any]:
    """Fields by name. An older version may have written fewer."""
    values = cast("list[Any]", msgspec.msgpack.decode(raw))
    return {**dict.fromkeys(fields), **dict(zip(fields, values, strict=False))}
