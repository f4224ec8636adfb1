"""The sealer's part of `meta/` objects: facts that changed go from the hot store to the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.hot_store.meta_tables import SECRETS_PREFIX, SUBSCRIPTION_PREFIX, MetaTables
from tailrace.storage.meta_facts import subscription_object
from tailrace.storage.meta_objects import WEBHOOK_KEYS_OBJECT, MetaObjects, encrypt_secrets, subscription_key
from tailrace.storage.object_store.objects import ObjectStore

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
        """Everything that changed in later journal files; the one that the bucket now speaks for."""
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
        """What a subject is by now. If that is more than it was at `as_of`, it is written once more."""
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
