"""`meta/` objects: which facts belong together, how they are named, who may replace them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tailrace.storage import meta_objects
from tailrace.storage.hot_store.database import HotDatabase
from tailrace.storage.hot_store.tables import SECRETS_PREFIX, MetaTables
from tailrace.storage.manifests.model import FencedError
from tailrace.storage.meta_objects import (
    MetaCorruptError,
    MetaObjects,
    SubscriptionLink,
    SubscriptionObject,
    decrypt_secrets,
    encrypt_secrets,
    key_fingerprint,
    subscription_key,
)
from tailrace.storage.object_store.interface import check_key, open_object_store
from tailrace.subscriptions.model import (
    HEAD_PREFIX,
    SetHead,
    SetLink,
    StreamLink,
    SubscriptionConfig,
    SubscriptionHead,
    Wake,
    decode_subscriptions,
    encode_changes,
)

HEAD = SubscriptionHead(
    SubscriptionConfig("pull-wake", "p/*", ("a",), None, "wake", 30_000, "é"), 5, 7, Wake("w", 7, {"a": "1"})
)


def names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind))


def test_the_fields_are_those_the_subscriptions_write() -> None:
    assert names(SubscriptionConfig) == meta_objects.CONFIG_FIELDS
    assert names(SubscriptionHead) == meta_objects.SUBSCRIPTION_FIELDS
    assert names(StreamLink) == meta_objects.LINK_FIELDS


def test_a_subscription_survives_being_an_object() -> None:
    changes = [
        SetHead(HEAD),
        SetLink("a/b", StreamLink("0" * 26, True, False)),
        SetLink("c", StreamLink("-1", False, True)),
    ]
    facts = {key: value for key, value in encode_changes("s", changes) if value is not None}
    found = meta_objects.subscription_object(HEAD_PREFIX + "s", facts, 3)
    assert (found.id, found.wake_generation, found.as_of) == ("s", 7, 3)
    again = msgspec.json.decode(msgspec.json.encode(found), type=SubscriptionObject)
    subs, orphans = decode_subscriptions(meta_objects.subscription_facts(again).items())
    assert not orphans
    assert subs["s"].head == msgspec.structs.replace(HEAD, wake=None)
    assert subs["s"].links == {"a/b": StreamLink("0" * 26, True, False), "c": StreamLink("-1", False, True)}


def test_cursors_are_set_back_and_never_forward() -> None:
    links = [
        SubscriptionLink(stream=name, acked=acked, explicit=True, glob=False)
        for name, acked in (("past", "5"), ("before", "2"), ("missing", "9"), ("none", "-1"))
    ]
    found = SubscriptionObject(id="s", config={}, created_ms=0, links=links, wake_generation=3)
    tails = {"past": "4", "before": "4", "none": "4"}
    restored = meta_objects.restored_subscription(found, tails.get)
    assert [link.acked for link in restored.links] == ["4", "2", "9", "-1"]
    assert restored.wake_generation > 3 + 10_000


def test_facts_are_found_by_subject(tmp_path: Path) -> None:
    db = HotDatabase(tmp_path / "hot.db", writer=True)
    tables = MetaTables(db)
    facts = {
        "subscription/a": b"1",
        "subscription-link/a/x": b"2",
        "subscription-link/a/x/y": b"3",
        "subscription/ab": b"4",
        "subscription-link/ab/x": b"5",
        "secret/k": b"6",
        "recorded/meta": b"7",
    }
    assert tables.newest_file() == -1
    for key, value in facts.items():
        db.put_meta(key, value)
    tables.changed([], 4)  # a store of an older version: everything is new
    assert tables.changed_since(3, "", 10) == [SECRETS_PREFIX, "subscription/a", "subscription/ab"]
    tables.changed(["subscription-link/ab/x", "recorded/meta", ""], 5)
    assert tables.newest_file() == 5
    assert tables.changed_since(4, "", 10) == ["subscription/ab"]
    assert tables.changed_since(3, "subscription/a", 10) == ["subscription/ab"]
    assert set(tables.facts_of("subscription/a")) == {
        "subscription/a",
        "subscription-link/a/x",
        "subscription-link/a/x/y",
    }
    assert tables.facts_of(SECRETS_PREFIX) == {"secret/k": b"6"}
    assert tables.facts_of("subscription/none") == {}


@pytest.mark.parametrize("given", ["a", "a b", "é", "%", "=", "🌊" * 64, "x" * 256, "a=b", "a%3Db"])
def test_every_id_has_a_name(given: str) -> None:
    check_key(subscription_key(given))


def test_names_differ() -> None:
    given = ["a=b", "a%3Db", "a=3Db", "🌊" * 63, "🌊" * 64, "x" * 255, "x" * 256]
    assert len({subscription_key(one) for one in given}) == len(given)


def test_the_newest_wins_and_an_owner_of_before_is_refused() -> None:
    async def run() -> None:
        objects = open_object_store("memory://meta-objects")
        first, second = MetaObjects(objects, 1), MetaObjects(objects, 2)
        made = SubscriptionObject(id="s", config=None, created_ms=1, as_of=5)

        async def stored() -> tuple[int, int, int]:
            found = await first.load("meta/s.json", SubscriptionObject)
            assert found is not None
            return found[0].generation, found[0].fence, found[0].as_of

        await first.put("meta/s.json", made)
        await first.put("meta/s.json", msgspec.structs.replace(made, as_of=4))
        assert await stored() == (1, 1, 5)
        await first.put("meta/s.json", made)
        assert await stored() == (2, 1, 5)
        await second.put("meta/s.json", msgspec.structs.replace(made, as_of=0))
        assert await stored() == (3, 2, 0)
        with pytest.raises(FencedError):
            await first.put("meta/s.json", made)
        # What cannot be read is replaced.
        await objects.replace("meta/s.json", b"{", (await objects.get("meta/s.json"))[1])
        with pytest.raises(MetaCorruptError):
            await stored()
        await second.put("meta/s.json", made)
        assert await stored() == (1, 2, 5)
        await asyncio.gather(*(second.put("meta/t.json", made) for _ in range(8)))
        await objects.close()

    asyncio.run(run())


def test_secrets_need_their_key() -> None:
    facts = {"secret/k": b"private"}
    locked = encrypt_secrets("k" * 32, facts, 1)
    assert b"private" not in msgspec.json.encode(locked)
    assert decrypt_secrets("k" * 32, locked) == facts
    with pytest.raises(MetaCorruptError):
        decrypt_secrets("l" * 32, locked)
    with pytest.raises(MetaCorruptError):
        decrypt_secrets("k" * 32, msgspec.structs.replace(locked, sealed=locked.sealed[:-1]))
    assert key_fingerprint("k" * 32) not in ("", key_fingerprint("l" * 32))
    assert key_fingerprint("") == ""


def test_the_example_in_the_documentation_is_a_subscription() -> None:
    page = Path(__file__).parents[3] / "docs" / "formats.md"
    text = page.read_text(encoding="utf-8").partition("```json subscription\n")[2].partition("```")[0]
    written = text.replace("\n", "").encode()
    found = msgspec.json.decode(written, type=SubscriptionObject)
    assert msgspec.json.encode(found, order="sorted") == written
    assert meta_objects.subscription_facts(found).keys() == {
        "subscription/orders",
        "subscription-link/orders/orders/1",
    }
