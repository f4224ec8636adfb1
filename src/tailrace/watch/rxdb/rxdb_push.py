"""Pushes of replicating clients: each row is decided when its turn has come in the order of writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import orjson

from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.watch import document, names
from tailrace.watch.access import AccessRules
from tailrace.watch.collection import Collection
from tailrace.watch.document import Document
from tailrace.watch.documents import DocumentWriter
from tailrace.watch.rxdb.push import PushRow, decide_push
from tailrace.watch.rxdb.rxdb_pages import DocumentShape
from tailrace.watch.writes import DocumentState, DocumentWrite, WriteResult

STATUS_CONFLICT: Final = 409
STATUS_UNCHANGED: Final = 304

# Told the documents that the client has to look at, or why nothing was done at all.
PushCallback = Callable[[list[Document], TailraceError | None], None]


class PushHandler:
    """All pushes of a server."""

    def __init__(self, writer: DocumentWriter, access: AccessRules) -> None:
        self._writer = writer
        self._access = access
        self.rows = {"written": 0, "same": 0, "conflict": 0, "refused": 0}

    def push(
        self,
        identity: Identity,
        database: str,
        name: str,
        rows: list[PushRow],
        shape: DocumentShape,
        told: PushCallback,
    ) -> None:
        """Submits what is accepted as one record; `told` comes when what it says is durable."""
        if not rows:
            told([], None)
            return
        conflicts: list[Document] = []
        writes = [
            _PushedWrite(self._access, identity, database, name, row, shape, conflicts).write for row in rows
        ]

        def answer(results: list[WriteResult], error: TailraceError | None) -> None:
            # One row that the rules refuse refuses the push: nothing of it was submitted.
            refusal = error or next((one.error for one in results if one.error is not None), None)
            if refusal is not None:
                self.rows["refused"] += len(results)
                told([], refusal)
                return
            same = sum(result.status == STATUS_UNCHANGED for result in results)
            self._writer.note_repeats(database, name, "push", same)
            for result in results:
                kind = (
                    "conflict"
                    if result.status == STATUS_CONFLICT
                    else "same"
                    if result.status == STATUS_UNCHANGED
                    else "written"
                )
                self.rows[kind] += 1
            told(conflicts, None)

        self._writer.write(database, writes, self._access.writing(identity), answer, atomic=True)


class _PushedWrite:
    """One row, and what it is told if it loses."""

    def __init__(
        self,
        access: AccessRules,
        identity: Identity,
        database: str,
        name: str,
        row: PushRow,
        shape: DocumentShape,
        conflicts: list[Document],
    ) -> None:
        self._access = access
        self._identity = identity
        self._row = row
        self._shape = shape
        self._conflicts = conflicts
        path = names.split_document_path(f"{names.check_collection(name)}/{row.id}")
        self._path = f"{path.collection}/{path.id}"
        op = "delete" if row.deleted else "put"
        self.write = DocumentWrite(op, path, row.content, judge=self._judge, buries=row.deleted)

    def _judge(self, collection: Collection, state: DocumentState | None) -> WriteResult | None:
        row = self._row
        current: Document | None = None if state is None else orjson.loads(state.data)
        verdict = decide_push(current, state is not None and state.deleted, row)
        if verdict in ("insert", "replace"):
            return None
        flat = self._flat(collection, current, state)
        readable = flat is not None and self._access.readable(self._identity, collection, flat)
        if verdict == "same":
            if not readable:
                # Whoever cannot read it must not learn by guessing either.
                self._check(collection, state, flat)
            assert state is not None
            return WriteResult(self._path, STATUS_UNCHANGED, state.version, state.updated_ms)
        self._check(collection, state, flat)
        shown = flat if readable and flat is not None else {**row.content, "id": row.id}
        gone = state is None or state.deleted or not readable
        self._conflicts.append(self._shape.of(shown, gone))
        return WriteResult(self._path, STATUS_CONFLICT)

    def _check(self, collection: Collection, state: DocumentState | None, flat: Document | None) -> None:
        """The write rule comes before everything that could tell something."""
        row = self._row
        new = document.flatten_document(row.content, row.id, collection.name, 0, 0, 0)
        lives = state is not None and not state.deleted
        check = self._access.writing(self._identity)
        if row.deleted:
            check(collection, "delete", flat if lives else new, None)
        else:
            check(collection, "update" if lives else "create", flat if lives else None, new)

    def _flat(
        self, collection: Collection, data: Document | None, state: DocumentState | None
    ) -> Document | None:
        if data is None or state is None:
            return None
        return document.flatten_document(
            data, self._row.id, collection.name, state.version, state.created_ms, state.updated_ms
        )
