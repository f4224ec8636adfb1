"""`meta/` objects: what the server knows and no segment holds. Replaced conditionally, the newest wins.

Each carries the fence of the owner who wrote it, a generation that grows with each change, and the journal
file it speaks for. See docs/formats.md, "Bucket".
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec
import xxhash

from tailrace.storage.manifests.model import FencedError
from tailrace.storage.object_store.bucket import list_objects
from tailrace.storage.object_store.objects import ObjectConflictError, ObjectMissingError

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

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
    """An object that cannot be read, or not with the key that was given."""


M = TypeVar("M", bound=MetaObject)


def subscription_key(subscription_id: str) -> str:
    """Ids may hold anything; the name of an object may not."""
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
        """Record it, unless we recorded a newer one."""
        await self.change(key, type(value), lambda _: value)

    async def change(self, key: str, kind: type[M], become: Callable[[M | None], M]) -> M:
        """Replace an object by what it becomes; `become` is asked again if it changed meanwhile."""
        for _attempt in range(META_ATTEMPTS_MAX):
            try:
                found = await self.load(key, kind)
            except MetaCorruptError:
                # Nobody can use it, so what it said does not matter; only its version of the object does.
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
    """Tells two keys apart and says nothing about either."""
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
