"""Which facts of the server itself have changed since the object store was told of them.

Facts have keys; those that are kept together as one object share a subject: a subscription and its links, or
all secrets. The table is made by the checkpointer; in a store that an older version left, everything is new.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from tailrace.storage.hot_store.hot import HotDatabase

SUBSCRIPTION_PREFIX: Final = "subscription/"
LINK_PREFIX: Final = "subscription-link/"
SECRETS_PREFIX: Final = "secret/"

_META_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS meta_changes(subject TEXT PRIMARY KEY, file INTEGER NOT NULL) WITHOUT ROWID"
)


def meta_subject(key: str) -> str | None:
    """None: the object store need not know."""
    if key.startswith(SUBSCRIPTION_PREFIX):
        return key
    if key.startswith(LINK_PREFIX):
        return SUBSCRIPTION_PREFIX + key[len(LINK_PREFIX) :].partition("/")[0]
    return SECRETS_PREFIX if key.startswith(SECRETS_PREFIX) else None


class MetaTables:
    def __init__(self, db: HotDatabase) -> None:
        self._db = db

    def exist(self) -> bool:
        return self._db.one("SELECT 1 FROM sqlite_schema WHERE name='meta_changes'") is not None

    # -- reading ---------------------------------------------------------------------------------------

    def newest_file(self) -> int:
        """The last journal file with a change, -1 if there is none."""
        row = self._db.one("SELECT max(file) FROM meta_changes") if self.exist() else None
        return -1 if row is None or row[0] is None else cast("int", row[0])

    def changed_since(self, file: int, after: str, limit: int) -> list[str]:
        """Subjects with changes in later journal files, in order, behind the one named."""
        if not self.exist():
            return []
        query = "SELECT subject FROM meta_changes WHERE file>? AND subject>? ORDER BY subject LIMIT ?"
        return [cast("str", row[0]) for row in self._db.rows(query, file, after, limit)]

    def facts_of(self, subject: str) -> dict[str, bytes]:
        """All facts of a subject by their keys; none if it is gone."""
        if subject == SECRETS_PREFIX:
            return self._below(SECRETS_PREFIX)
        row = self._db.one("SELECT value FROM meta WHERE key=?", subject)
        if row is None:
            return {}
        return {
            subject: cast("bytes", row[0]),
            **self._below(LINK_PREFIX + subject[len(SUBSCRIPTION_PREFIX) :] + "/"),
        }

    def _below(self, prefix: str) -> dict[str, bytes]:
        """'0' comes right after '/'."""
        query = "SELECT key, value FROM meta WHERE key>? AND key<? ORDER BY key"
        rows = self._db.rows(query, prefix, prefix[:-1] + "0")
        return dict(cast("tuple[str, bytes]", row) for row in rows)

    # -- writing (checkpointer only) ---------------------------------------------------------------------

    def changed(self, keys: Iterable[str], file: int) -> None:
        """Before the facts themselves are written. A journal file changed these."""
        if not self.exist():
            self._db.execute(_META_SCHEMA)
            keys = [*keys, *self._db.meta()]
        for subject in {meta_subject(key) for key in keys} - {None}:
            self._db.execute("INSERT OR REPLACE INTO meta_changes VALUES(?, ?)", (subject, file))
