"""A bootstrap's part of `meta/` objects: subscriptions with their cursors, and webhook keys."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tailrace.log.stored_streams import decode_stream
from tailrace.storage.hot_store.hot import HotDatabase
from tailrace.storage.meta_facts import restored_subscription, subscription_facts
from tailrace.storage.meta_objects import (
    WEBHOOK_KEYS_OBJECT,
    MetaObjects,
    SecretsObject,
    SubscriptionObject,
    decrypt_secrets,
)


def stream_tails(db: HotDatabase, names: list[str]) -> dict[str, str]:
    """The offsets at which restored streams end."""
    tails: dict[str, str] = {}
    for name in names:
        raw = db.image_by_name(name)
        if raw is not None:
            stream = decode_stream(raw)
            tails[name] = stream.offset(stream.tail)
    return tails


def put_server_facts(db: HotDatabase, facts: Mapping[str, bytes]) -> None:
    with db.write():
        for key, value in facts.items():
            db.put_meta(key, value)


async def restore_subscription(
    objects: MetaObjects, key: str, found: SubscriptionObject, tails: Mapping[str, str]
) -> dict[str, bytes]:
    """The facts to go on with. The object says so first: its generations must not be used twice."""

    def become(current: SubscriptionObject | None) -> SubscriptionObject:
        return restored_subscription(current or found, tails.get)

    return subscription_facts(await objects.change(key, SubscriptionObject, become))


async def restore_secrets(objects: MetaObjects, recovery_key: str) -> dict[str, bytes]:
    """The webhook keys, or nothing if there are none to be had: then the server makes new ones."""
    loaded = await objects.load(WEBHOOK_KEYS_OBJECT, SecretsObject) if recovery_key else None
    if loaded is None:
        return {}
    facts = decrypt_secrets(recovery_key, loaded[0])
    kept = msgspec.structs.replace(loaded[0], as_of=0)
    await objects.put(WEBHOOK_KEYS_OBJECT, kept)
    return facts
