"""One write to a document: as it is asked for, decided and answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from tailrace.common.errors import TailraceError
from tailrace.watch.collection import Collection
from tailrace.watch.document import Document
from tailrace.watch.names import DocumentPath

# Asked when the write's turn has come, with the document as it is then: a result settles the write, None lets
# it go on.
WriteDecider = Callable[[Collection, "State | None"], "Result | None"]


class DocumentWrite(NamedTuple):
    """One write as it was asked for."""

    op: Literal["put", "patch", "delete"]
    path: DocumentPath
    data: Document | None = None
    if_version: int | None = None
    if_present: bool = False
    if_absent: bool = False
    judge: WriteDecider | None = None
    buries: bool = False  # a delete of what never was leaves a tombstone with `data`


class WriteResult(msgspec.Struct):
    """What became of one write."""

    path: str
    status: int
    version: int | None = None
    updated_ms: int | None = None
    error: TailraceError | None = None

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = {"path": self.path, "status": self.status}
        if self.version is not None:
            found["version"] = self.version
        if self.error is not None:
            found["error"] = orjson.loads(self.error.body())["error"]
        return found


class DocumentState(NamedTuple):
    """A document as the next decision sees it: perhaps not durable yet."""

    version: int
    created_ms: int
    updated_ms: int
    deleted: bool
    data: bytes
