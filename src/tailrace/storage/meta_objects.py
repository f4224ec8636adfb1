"""`meta/` objects: documents, subscriptions and encrypted secrets in the bucket; recording and restoring.

Each object has the fence of the owner that wrote it, a generation that increases with each change, and the
journal file it covers. Objects are replaced conditionally; the newest wins. See docs/formats.md, "Bucket".

- Documents of a stream are `meta/<key>.json` in its folder, named by its manifest. They are written before
  the manifest with entries that depend on them: a schema registry in the bucket is never older than the
  entries.
- A subscription is several facts of the log and one object in the bucket. The facts are MessagePack arrays
  written by the subscriptions; their field order is repeated here because storage may not import them.
- The sealer copies changed facts from the hot store to the bucket. The server knows how far the bucket is
  behind from a fact of the log, so nothing is written again after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import quote

import msgspec
import xxhash

from tailrace.common.caches import LruCache
from tailrace.log.stored_streams import StoredStreams, decode_stream
from tailrace.log.transaction import await_commit
from tailrace.storage.hot_store.database import HotDatabase
from tailrace.storage.hot_store.tables import LINK_PREFIX, SECRETS_PREFIX, SUBSCRIPTION_PREFIX, MetaTables
from tailrace.storage.manifests.model import FencedError
from tailrace.storage.object_store.interface import ObjectConflictError, ObjectMissingError, ObjectStore
from tailrace.storage.object_store.listing import list_objects
from tailrace.storage.segments.model import stream_prefix

if TYPE_CHECKING:
    from tailrace.log.log import Log
    from tailrace.storage.sealing import SealingService


META_VERSION: Final = 1
SUBSCRIPTIONS_KEY_PREFIX: Final = "meta/subscriptions/"
WEBHOOK_KEYS_OBJECT: Final = "meta/webhook-keys.json"
META_ATTEMPTS_MAX: Final = 16
NAME_BYTES_MAX: Final = 200
_NONCE_BYTES: Final = 12
_KEY_CONTEXT: Final = b"tailrace webhook keys 1"


class MetaObject(msgspec.Struct, frozen=True, kw_only=True):
    version: int = META_VERSION
    fence: int = 0
    generation: int = 0
    as_of: int = 0


class SubscriptionLink(msgspec.Struct, frozen=True, kw_only=True):
    stream: str
    acked: str  # the cursor: everything up to here is processed
    explicit: bool
    glob: bool


class SubscriptionObject(MetaObject, frozen=True, kw_only=True):
    """A subscription; without a configuration, what is left of a deleted one."""

    id: str
    config: dict[str, Any] | None
    created_ms: int
    deleted_ms: int | None = None
    base_url: str = ""
    wake_generation: int = 0
    links: list[SubscriptionLink] = []


class SecretsObject(MetaObject, frozen=True, kw_only=True):
    """Secrets, readable with the operator's key only."""

    nonce: bytes
    sealed: bytes


class MetaCorruptError(Exception):
    """An object that cannot be read, or not with the given key."""


M = TypeVar("M", bound=MetaObject)


def subscription_key(subscription_id: str) -> str:
    """Escapes an id, which may contain any characters, for an object name."""
    name = quote(subscription_id, safe="").replace("%", "=")
    if len(name) > NAME_BYTES_MAX:
        name = f"{name[:100]}={xxhash.xxh3_128_hexdigest(subscription_id.encode())}"
    return f"{SUBSCRIPTIONS_KEY_PREFIX}{name}.json"


class MetaObjects:
    """The `meta/` objects of a bucket, as one owner with one fence sees and changes them."""

    def __init__(self, objects: ObjectStore, fence: int) -> None:
        self._objects = objects
        self._fence = fence

    async def load(self, key: str, kind: type[M]) -> tuple[M, str] | None:
        try:
            data, etag = await self._objects.get(key)
        except ObjectMissingError:
            return None
        try:
            found = msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise MetaCorruptError(f"{key} cannot be read: {error}") from None
        if found.version > META_VERSION:
            raise MetaCorruptError(f"{key} was written by a newer version of Tailrace")
        return found, etag

    async def put(self, key: str, value: MetaObject) -> None:
        """Records it, unless a newer one of ours is recorded."""
        await self.change(key, type(value), lambda _: value)

    async def change(self, key: str, kind: type[M], become: Callable[[M | None], M]) -> M:
        """Replaces an object by `become(current)`, which is called again after a lost race."""
        for _attempt in range(META_ATTEMPTS_MAX):
            try:
                found = await self.load(key, kind)
            except MetaCorruptError:
                # It is unusable, so its content does not matter; only its version does.
                _, etag = await self._objects.get(key)
                found, current = None, None
            else:
                current, etag = (None, None) if found is None else found
            if current is not None and current.fence > self._fence:
                raise FencedError(f"{key} was written by a new owner of the bucket (fence {current.fence})")
            value = become(current)
            if current is not None and current.fence == self._fence and current.as_of > value.as_of:
                return current
            generation = 1 if current is None else current.generation + 1
            value = msgspec.structs.replace(value, fence=self._fence, generation=generation)
            try:
                await self._objects.replace(key, msgspec.json.encode(value, order="sorted"), etag)
            except ObjectConflictError:
                continue
            return value
        raise MetaCorruptError(f"{key} changed {META_ATTEMPTS_MAX} times while it was written")

    async def delete(self, key: str) -> None:
        await self._objects.delete([key])

    async def subscription_keys(self) -> AsyncIterator[str]:
        async for info in list_objects(self._objects, SUBSCRIPTIONS_KEY_PREFIX):
            yield info.key


# -- secrets ------------------------------------------------------------------------------------------------


def key_fingerprint(recovery_key: str) -> str:
    """Identifies a key without revealing it."""
    return hashlib.sha256(b"fingerprint" + _derive_key(recovery_key)).hexdigest()[:16] if recovery_key else ""


def encrypt_secrets(recovery_key: str, facts: dict[str, bytes], as_of: int) -> SecretsObject:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = AESGCM(_derive_key(recovery_key)).encrypt(nonce, msgspec.msgpack.encode(facts), _KEY_CONTEXT)
    return SecretsObject(as_of=as_of, nonce=nonce, sealed=sealed)


def decrypt_secrets(recovery_key: str, found: SecretsObject) -> dict[str, bytes]:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        plain = AESGCM(_derive_key(recovery_key)).decrypt(found.nonce, found.sealed, _KEY_CONTEXT)
    except (InvalidTag, ValueError):
        raise MetaCorruptError(f"{WEBHOOK_KEYS_OBJECT} was not encrypted with this recovery_key") from None
    return msgspec.msgpack.decode(plain, type=dict[str, bytes])


def _derive_key(recovery_key: str) -> bytes:
    return hashlib.blake2b(recovery_key.encode(), digest_size=32, person=b"tailrace meta 1").digest()


REMEMBERED_DOCUMENTS_MAX: Final = 10_000


class DocumentObject(MetaObject, frozen=True, kw_only=True):
    document: msgspec.Raw  # byte for byte as the stream has it


def document_key(stream_id: str, key: str) -> str:
    return f"{stream_prefix(stream_id)}meta/{key}.json"


class DocumentObjects:
    """The documents of all streams, as one owner sees and changes them."""

    def __init__(self, objects: MetaObjects) -> None:
        self._objects = objects
        # Hashes, so that nothing is written twice.
        self._written: LruCache[str, bytes] = LruCache(entries_max=REMEMBERED_DOCUMENTS_MAX)

    async def publish(self, stream_id: str, documents: Mapping[str, bytes], as_of: int) -> None:
        for key, document in documents.items():
            name, digest = document_key(stream_id, key), hashlib.sha256(document).digest()
            if self._written.get(name) == digest:
                continue
            await self._objects.put(name, DocumentObject(as_of=as_of, document=msgspec.Raw(document)))
            self._written.put(name, digest)

    async def restore(self, stream_id: str, key: str, tail: int) -> bytes:
        """A document for a stream that continues after entry `tail`. The object is updated first."""
        name = document_key(stream_id, key)
        found = await self._objects.load(name, DocumentObject)
        if found is None:
            raise MetaCorruptError(f"{name} is missing")

        def become(current: DocumentObject | None) -> DocumentObject:
            document = restored_document(key, bytes((current or found[0]).document), tail)
            return DocumentObject(document=msgspec.Raw(document))

        return bytes((await self._objects.change(name, DocumentObject, become)).document)


def restored_document(key: str, document: bytes, tail: int) -> bytes:
    """A registry whose versions start with lost entries: they start with the next ones instead."""
    if key != "schema":
        return document
    registry = msgspec.json.decode(document, type=dict[str, object])
    boundaries = cast("list[dict[str, int]]", registry["boundaries"])
    if all(boundary["offset"] <= tail for boundary in boundaries):
        return document
    for boundary in boundaries:
        boundary["offset"] = min(boundary["offset"], tail)
    return msgspec.json.encode(registry)


def versions_within(document: bytes, first: int, last: int) -> str:
    """Where versions start among these entries, as JSON pairs of entry and version; 0 is before the first."""
    boundaries = msgspec.json.decode(document, type=_Boundaries).boundaries
    if not boundaries:
        return ""
    version = 0
    within: list[tuple[int, int]] = []
    for boundary in boundaries:
        begins = boundary["offset"] + 1  # sequence numbers count from 0, entries from 1
        if begins <= first:
            version = boundary["version"]
        elif begins <= last:
            within.append((begins, boundary["version"]))
    return msgspec.json.encode([(first, version), *within]).decode()


def version_cuts(document: bytes) -> list[int]:
    """Entries after which another schema version starts."""
    boundaries = msgspec.json.decode(document, type=_Boundaries).boundaries
    return [boundary["offset"] for boundary in boundaries]  # numbers count from 0, entries from 1


class _Boundaries(msgspec.Struct):
    boundaries: list[dict[str, int]]


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
    """The restored subscription: cursors are set back to the existing tails, old wakes are void."""
    links: list[SubscriptionLink] = []
    for link in found.links:
        tail = tail_of(link.stream)
        past = tail is not None and link.acked > tail
        links.append(msgspec.structs.replace(link, acked=tail) if past else link)
    return msgspec.structs.replace(
        found, links=links, wake_generation=found.wake_generation + GENERATIONS_LOST_MAX, as_of=0
    )


def subscription_facts(found: SubscriptionObject) -> dict[str, bytes]:
    """The facts of a subscription without a pending wake."""
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


META_PAGE_COUNT = 100
T = TypeVar("T")


class MetaObjectSealer:
    """Writes one object for each subject that changed. Doing it again does no harm."""

    def __init__(
        self, store: StoredStreams, objects: ObjectStore, fence: int, recovery_key: str, threads: Executor
    ) -> None:
        self._store = store
        self._objects = MetaObjects(objects, fence)
        self._recovery_key = recovery_key
        self._threads = threads
        self._secrets_due = bool(recovery_key)  # the key may be another than the last time

    async def record(self, since_file: int) -> int:
        """Records all changes in later journal files; returns the file that the bucket now covers."""
        as_of = await self._on_thread(lambda: self._store.db.journal_seq)
        if self._secrets_due:
            await self._write(SECRETS_PREFIX, as_of)
            self._secrets_due = False
        after = ""
        while subjects := await self._on_thread(partial(self._changed_since, since_file, after)):
            for subject in subjects:
                await self._write(subject, as_of)
            after = subjects[-1]
        return as_of

    async def _write(self, subject: str, as_of: int) -> None:
        """The current state of a subject. If it is newer than `as_of`, it is written once more."""
        facts = await self._on_thread(lambda: self._facts(subject))
        if subject == SECRETS_PREFIX:
            if self._recovery_key and facts:
                await self._objects.put(
                    WEBHOOK_KEYS_OBJECT, encrypt_secrets(self._recovery_key, facts, as_of)
                )
        elif facts:
            found = subscription_object(subject, facts, as_of)
            await self._objects.put(subscription_key(found.id), found)
        else:
            await self._objects.delete(subscription_key(subject[len(SUBSCRIPTION_PREFIX) :]))

    def _changed_since(self, file: int, after: str) -> list[str]:
        return MetaTables(self._store.db).changed_since(file, after, META_PAGE_COUNT)

    def _facts(self, subject: str) -> dict[str, bytes]:
        with self._store.snapshot():
            return MetaTables(self._store.db).facts_of(subject)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


META_RECORDED_FACT: Final = "recorded/meta"


class MetaRecorder:
    def __init__(self, sealing: SealingService, log: Log, recovery_key: str) -> None:
        self._sealing = sealing
        self._log = log
        self._fingerprint = key_fingerprint(recovery_key)
        self._age_s = log.limits.seal_age_ms / 1000
        self._waits_since_s: float | None = None

    def waits_for_checkpoint(self, seq: int, now_s: float) -> bool:
        """Whether facts have been in the journal only for as long as entries may be."""
        if not self.uncheckpointed(seq):
            self._waits_since_s = None
            return False
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        return now_s - self._waits_since_s >= self._age_s

    def uncheckpointed(self, seq: int) -> bool:
        """Whether there are facts after this journal file."""
        return self._log.streams.meta_file > seq

    async def record(self) -> bool:
        """True if the bucket has what the hot store has."""
        file, _, key = self._log.streams.meta.get(META_RECORDED_FACT, b"-1").decode().partition(" ")
        newest = await self._sealing.on_thread(lambda: MetaTables(self._log.store.db).newest_file())
        if newest < 0 or (newest <= int(file) and key == self._fingerprint):
            return True
        report = await self._sealing.run_job("meta", [], int(file))
        if report.error:
            return False
        value = f"{report.as_of} {self._fingerprint}".encode()
        await await_commit(partial(self._log.put_meta, META_RECORDED_FACT, value))
        return True


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
    """The restored facts. The object is updated first: its generations must not be used twice."""

    def become(current: SubscriptionObject | None) -> SubscriptionObject:
        return restored_subscription(current or found, tails.get)

    return subscription_facts(await objects.change(key, SubscriptionObject, become))


async def restore_secrets(objects: MetaObjects, recovery_key: str) -> dict[str, bytes]:
    """The webhook keys, or nothing if they cannot be read: then the server creates new ones."""
    loaded = await objects.load(WEBHOOK_KEYS_OBJECT, SecretsObject) if recovery_key else None
    if loaded is None:
        return {}
    facts = decrypt_secrets(recovery_key, loaded[0])
    restored = msgspec.structs.replace(loaded[0], as_of=0)
    await objects.put(WEBHOOK_KEYS_OBJECT, restored)
    return facts
