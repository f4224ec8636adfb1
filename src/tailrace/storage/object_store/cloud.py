"""Cloud buckets through obstore (S3, Google Cloud, Azure): credentials, error classes, retries.

obstore makes one attempt; retries are decided here, because only here is known what a repeat means. A write
whose response was lost may have succeeded: the repeat is then refused because of our own object, and the
stored content is compared with what was written.

The errors of obstore are interpreted only here. They have the HTTP status only in their text, so the text is
parsed; without a status there was no response.

Missing credentials are reported before a request: without keys obstore would query the metadata address of
the cloud for a machine role, which outside of a cloud looks like a store that does not respond.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, Protocol, TypedDict, TypeVar, cast

from obstore.exceptions import (
    AlreadyExistsError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from tailrace.common.backoff import backoff_delay
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
from tailrace.storage.object_store.interface import (
    ObjectConflictError,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStoreError,
    ObjectStoreRefusedError,
    ObjectStoreUnavailableError,
    check_key,
    check_prefix,
)

logger = logging.getLogger("tailrace.store")

PAUSE_MS_MAX: Final = 5000
MESSAGE_CHARS_MAX: Final = 500

_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
# Status 400, but they all mean that the request was damaged in transit.
_DAMAGED_CODES: Final = frozenset(
    {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}
)
_RETRY_STATUS: Final = frozenset({408, 425, 429})
_METADATA_HOSTS: Final = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class Fault(Enum):
    MISSING = "missing"  # no such object
    TAKEN = "taken"  # the object exists
    CHANGED = "changed"  # the object is another version
    BUSY = "busy"  # the object is being written; or it exists, as some stores report it
    PASSING = "passing"  # trying again may help, and the request may have been carried out
    REFUSED = "refused"  # trying again does not help


def classify_error(error: Exception) -> Fault:
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    code = match[1] if (match := _CODE.search(text)) else ""
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return Fault.REFUSED
    if isinstance(error, FileNotFoundError):
        return Fault.MISSING
    if isinstance(error, AlreadyExistsError | PreconditionError):
        if status == 409:
            return Fault.BUSY
        return Fault.TAKEN if isinstance(error, AlreadyExistsError) else Fault.CHANGED
    if isinstance(error, _REFUSALS):
        return Fault.REFUSED
    if 300 <= status < 500 and status not in _RETRY_STATUS and code not in _DAMAGED_CODES:
        return Fault.REFUSED
    return Fault.REFUSED if status == 501 else Fault.PASSING


def is_beyond_end(error: Exception) -> bool:
    """Whether the requested range starts after the end of the object."""
    found = _STATUS.search(str(error))
    return found[1] == "416" if found else "Wanted range starting at" in str(error)


_REFUSALS: Final = (
    PermissionDeniedError,
    UnauthenticatedError,
    NotSupportedError,
    InvalidPathError,
    UnknownConfigurationKeyError,
    RuntimeError,  # raised by obstore for a condition that a store does not support
    ValueError,
    TypeError,
)


def describe_error(error: Exception) -> str:
    """The error in one line: obstore adds pages of internals and response bodies."""
    text = str(error).split("\n\nDebug source:")[0]
    code = match[1] if (match := _CODE.search(text)) else ""
    text = text.split("<?xml")[0].strip().rstrip(":")
    hint = ""
    if any(host in text for host in _METADATA_HOSTS):
        hint = "; no keys in the environment; the machine's role was requested"
    return f"{text[:MESSAGE_CHARS_MAX]}{f' ({code})' if code else ''}{hint}" or type(error).__name__


def refused_error(url: str, key: str, error: Exception) -> ObjectStoreRefusedError:
    return ObjectStoreRefusedError(key, f"{url} refuses access: {describe_error(error)}")


class RetryBudget:
    """How often and how long one call is tried: a deadline, a number of tries, and pauses between them."""

    def __init__(self, url: str, key: str, limits: Limits) -> None:
        self._url = url
        self._key = key
        self._limits = limits
        self._deadline_s = time.monotonic() + limits.object_ms / 1000
        self.tries = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    async def back_off(self, error: Exception) -> None:
        """Backs off before the next attempt, or raises the last error.

        The pause is random up to a bound that doubles, so that callers that failed together do not retry
        together.
        """
        self.tries += 1
        pause_s = backoff_delay(self.tries, self._limits.object_retry_ms, PAUSE_MS_MAX, jitter=0.9) / 1000
        if self.tries >= self._limits.object_tries or pause_s >= self.left_s:
            raise self.exhausted(error) from error
        fields = log_fields(key=self._key, attempt=self.tries, error=describe_error(error))
        logger.debug("object store request failed, retrying", extra=fields)
        await asyncio.sleep(pause_s)

    def exhausted(self, error: Exception) -> ObjectStoreUnavailableError:
        tries = f"{self.tries} {'try' if self.tries == 1 else 'tries'}"
        reason = "no response in time" if isinstance(error, TimeoutError) else describe_error(error)
        return ObjectStoreUnavailableError(self._key, f"{self._url} is unavailable after {tries}: {reason}")


_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
# Each is enough, all of one group together.
_CREDENTIALS: Final = {
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE",),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
    ),
    "az": (
        ("AZURE_STORAGE_ACCOUNT_KEY",),
        ("AZURE_STORAGE_SAS_KEY",),
        ("AZURE_STORAGE_SAS_TOKEN",),
        ("AZURE_STORAGE_TOKEN",),
        ("AZURE_CLIENT_ID", "AZURE_TENANT_ID"),
        ("AZURE_FEDERATED_TOKEN_FILE",),
    ),
}
_UNSIGNED: Final = {"s3": "AWS_SKIP_SIGNATURE", "az": "AZURE_SKIP_SIGNATURE"}


def endpoint_of(scheme: str, env: Mapping[str, str]) -> str:
    """The server that was named, empty for the cloud's own."""
    return next((env[name] for name in _ENDPOINTS.get(scheme, ()) if env.get(name)), "")


def check_credentials(url: str, scheme: str, env: Mapping[str, str]) -> None:
    """ValueError if a server was named and nothing that could open its door."""
    endpoint = endpoint_of(scheme, env)
    if not endpoint or env.get(_UNSIGNED[scheme], "").lower() in ("1", "true", "yes", "on"):
        return
    if any(all(env.get(name) for name in group) for group in _CREDENTIALS[scheme]):
        return
    wanted, unsigned = " and ".join(_CREDENTIALS[scheme][0]), _UNSIGNED[scheme]
    raise ValueError(
        f"there are no keys for {url} at {endpoint}: set {wanted}, or {unsigned}=true if it needs none"
    )


DELETES_AT_ONCE: Final = 1000  # limit of one request to S3
DELETES_TOGETHER: Final = 8
CONNECT_MS_MAX: Final = 5000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MEMORY: Final[dict[str, ObstoreBucket]] = {}

T = TypeVar("T")


class ObstoreMeta(TypedDict):
    path: str
    last_modified: datetime
    size: int
    e_tag: str | None
    version: str | None


class ObstorePutResult(TypedDict):
    e_tag: str | None
    version: str | None


class ObstoreGetResult(Protocol):
    @property
    def meta(self) -> ObstoreMeta: ...
    async def bytes_async(self) -> memoryview: ...


class ObstoreBucket(Protocol):
    """The part of obstore's stores that is used; its own annotations are incomplete."""

    def put_async(
        self, path: str, file: bytes | memoryview, *, mode: str | dict[str, str], use_multipart: bool
    ) -> Awaitable[ObstorePutResult]: ...
    def get_async(
        self, path: str, *, options: dict[str, object] | None = None
    ) -> Awaitable[ObstoreGetResult]: ...
    def head_async(self, path: str) -> Awaitable[ObstoreMeta]: ...
    def delete_async(self, paths: str | Sequence[str]) -> Awaitable[None]: ...
    def list(
        self, prefix: str | None, *, offset: str | None, chunk_size: int
    ) -> AsyncIterator[Sequence[ObstoreMeta]]: ...


def open_cloud_store(url: str, scheme: str, bucket: str, prefix: str, limits: Limits) -> CloudObjectStore:
    """Keys, endpoint and region come from the environment variables of each cloud's own tools."""
    if scheme == "memory":
        from obstore.store import MemoryStore

        if prefix:
            raise ValueError(f"{url!r}: a memory store has only a name")
        store = _MEMORY.setdefault(bucket, cast("ObstoreBucket", MemoryStore()))
    else:
        check_credentials(url, scheme, os.environ)
        try:
            store = _open_cloud(scheme, bucket, prefix, limits)
        except Exception as error:
            raise refused_error(url, "", error) from error
    return CloudObjectStore(url, scheme, store, limits)


def _open_cloud(scheme: str, bucket: str, prefix: str, limits: Limits) -> ObstoreBucket:
    from obstore.store import AzureStore, GCSStore, S3Store

    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(milliseconds=limits.object_try_ms),
            "connect_timeout": timedelta(milliseconds=min(CONNECT_MS_MAX, limits.object_try_ms)),
            "allow_http": _plain_http_wanted(),
        },
        "retry_config": {"max_retries": 0},
        "prefix": prefix or None,
    }
    if scheme == "az" and (account := os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
        options["account_name"] = account  # the library finds it, but fails to print a store without it
    kinds: dict[str, Callable[..., object]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    return cast("ObstoreBucket", kinds[scheme](bucket, **options))


def _plain_http_wanted() -> bool:
    """obstore needs an explicit option for an http:// endpoint."""
    if any(endpoint_of(scheme, os.environ).startswith("http://") for scheme in ("s3", "az")):
        return True
    allowed = (os.environ.get(name, "") for name in ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP"))
    return any(value.lower() in ("1", "true", "yes") for value in allowed)


class CloudObjectStore:
    """See `ObjectStore`."""

    def __init__(self, url: str, scheme: str, store: ObstoreBucket, limits: Limits) -> None:
        self.url = url
        self.requests: Counter[str] = Counter()
        self.bytes_out = 0
        self.bytes_in = 0
        self._store = store
        self._limits = limits
        # Google's conditions name a generation, all others an etag.
        self._by_version = scheme == "gs"
        self._bulk_deletes = scheme == "s3"
        # S3 servers start after `after` in their own key order; Azure's emulator does not.
        self._sorts_own_way = scheme == "s3"

    # -- writing ---------------------------------------------------------------------------------------

    async def create(self, key: str, data: bytes | memoryview) -> str:
        check_key(key)
        budget = self._new_budget(key)
        uncertain = False
        while True:
            tag, fault, error = await self._put("create", key, data, "create", budget)
            if fault is None:
                return tag
            if fault is Fault.PASSING:
                uncertain = True
            elif fault is Fault.TAKEN and not uncertain:
                raise ObjectExistsError(key, "exists") from error
            elif fault in (Fault.TAKEN, Fault.BUSY):
                present = await self._present(key, data, budget, compare=uncertain)
                if present is not None:
                    tag, ours = present
                    if ours:
                        return tag
                    raise ObjectExistsError(key, "exists") from error
            else:
                raise self._refused(key, error) from error
            await self._again(budget, error)

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        check_key(key)
        budget = self._new_budget(key)
        uncertain = False
        mode = "create" if etag is None else {"version" if self._by_version else "e_tag": etag}
        while True:
            tag, fault, error = await self._put("replace", key, data, mode, budget)
            if fault is None:
                return tag
            if fault is Fault.PASSING:
                uncertain = True
            elif fault is Fault.REFUSED or (fault is Fault.MISSING and etag is None):
                raise self._refused(key, error) from error
            elif fault is not Fault.BUSY and not uncertain:
                raise ObjectConflictError(key, "was replaced meanwhile") from error
            else:
                present = await self._present(key, data, budget, compare=uncertain)
                tag, ours = present or (None, False)
                if ours and tag is not None:
                    return tag
                if tag != etag:
                    raise ObjectConflictError(key, "was replaced meanwhile") from error
            await self._again(budget, error)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if self._bulk_deletes:
            for at in range(0, len(keys), DELETES_AT_ONCE):
                await self._delete(list(keys[at : at + DELETES_AT_ONCE]))
            return
        for at in range(0, len(keys), DELETES_TOGETHER):
            await asyncio.gather(*(self._delete(key) for key in keys[at : at + DELETES_TOGETHER]))

    async def _delete(self, keys: str | list[str]) -> None:
        key = keys if isinstance(keys, str) else keys[0]
        try:
            await self._read("delete", key, self._new_budget(key), lambda: self._store.delete_async(keys))
        except ObjectMissingError:
            pass

    async def _put(
        self,
        kind: str,
        key: str,
        data: bytes | memoryview,
        mode: str | dict[str, str],
        budget: RetryBudget,
    ) -> tuple[str, Fault | None, Exception]:
        """One try. The tag, or what went wrong."""
        self.requests[kind] += 1
        self.bytes_out += len(data)
        try:
            async with asyncio.timeout(budget.left_s):
                written = await self._store.put_async(key, data, mode=mode, use_multipart=False)
        except TimeoutError as error:
            return "", Fault.PASSING, error
        except Exception as error:  # noqa: BLE001 - sorted out by what it says
            return "", classify_error(error), error
        return self._tag(written), None, _NOTHING_WRONG

    async def _present(
        self, key: str, data: bytes | memoryview, budget: RetryBudget, *, compare: bool
    ) -> tuple[str, bool] | None:
        """The etag of the stored object and whether it is exactly `data`; None if there is none."""
        try:
            info = await self._head(key, budget)
            if not compare or info.size != len(data):
                return info.etag, False
            found, tag = await self._get(key, budget)
        except ObjectMissingError:
            return None
        return tag, found == data

    # -- reading ---------------------------------------------------------------------------------------

    async def get(self, key: str) -> tuple[bytes, str]:
        check_key(key)
        return await self._get(key, self._new_budget(key))

    async def _get(self, key: str, budget: RetryBudget) -> tuple[bytes, str]:
        async def fetch() -> tuple[bytes, str]:
            found = await self._store.get_async(key)
            data = bytes(await found.bytes_async())
            self.bytes_in += len(data)
            if len(data) != found.meta["size"]:
                raise ConnectionError(f"{len(data)} of {found.meta['size']} bytes received")
            return data, self._tag(found.meta)

        return await self._read("get", key, budget, fetch)

    async def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_key(key)
        assert 0 <= start <= stop
        if start == stop:
            return b""

        async def fetch() -> bytes:
            try:
                found = await self._store.get_async(key, options={"range": (start, stop)})
            except Exception as error:
                if is_beyond_end(error):
                    raise ObjectMissingError(key, f"ends before byte {stop}") from error
                raise
            if found.meta["size"] < stop:
                raise ObjectMissingError(key, f"ends before byte {stop}")
            data = bytes(await found.bytes_async())
            self.bytes_in += len(data)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} of {stop - start} bytes received")
            return data

        return await self._read("range", key, self._new_budget(key), fetch)

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return await self._head(key, self._new_budget(key))

    async def _head(self, key: str, budget: RetryBudget) -> ObjectInfo:
        return self._info(await self._read("head", key, budget, lambda: self._store.head_async(key)))

    async def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        check_prefix(prefix)

        async def fetch() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            chunks = self._store.list(prefix.rstrip("/") or None, offset=after or None, chunk_size=limit)
            async for chunk in chunks:
                found += [self._info(meta) for meta in chunk if self._sorts_own_way or meta["path"] > after]
                if len(found) >= limit:
                    break
            return found[:limit]

        return await self._read("list", prefix, self._new_budget(prefix), fetch)

    async def close(self) -> None:
        """Connections belong to the library, which drops them with the store."""

    # -- trying ----------------------------------------------------------------------------------------

    async def _read(self, kind: str, key: str, budget: RetryBudget, request: Callable[[], Awaitable[T]]) -> T:
        """Retries until there is a response: for requests that may be repeated freely."""
        while True:
            self.requests[kind] += 1
            try:
                async with asyncio.timeout(budget.left_s):
                    return await request()
            except ObjectStoreError:
                raise
            except Exception as error:
                fault = Fault.PASSING if isinstance(error, TimeoutError) else classify_error(error)
                if fault is Fault.MISSING:
                    raise ObjectMissingError(key, "does not exist") from error
                if fault is not Fault.PASSING and fault is not Fault.BUSY:
                    raise self._refused(key, error) from error
                last = error
            await self._again(budget, last)

    async def _again(self, budget: RetryBudget, error: Exception) -> None:
        try:
            await budget.back_off(error)
        except ObjectStoreError:
            self.requests["error"] += 1
            raise
        self.requests["retry"] += 1

    def _refused(self, key: str, error: Exception) -> ObjectStoreError:
        self.requests["error"] += 1
        return refused_error(self.url, key, error)

    def _new_budget(self, key: str) -> RetryBudget:
        return RetryBudget(self.url, key, self._limits)

    def _tag(self, meta: ObstoreMeta | ObstorePutResult) -> str:
        return (meta["version"] if self._by_version else meta["e_tag"]) or ""

    def _info(self, meta: ObstoreMeta) -> ObjectInfo:
        modified_us = (meta["last_modified"] - _EPOCH) // timedelta(microseconds=1)
        return ObjectInfo(meta["path"], meta["size"], self._tag(meta), modified_us * 1000)


_NOTHING_WRONG: Final = Exception()
