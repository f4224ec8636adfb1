"""Changes of documents without a log, for tests of the matcher."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from tailrace.watch.document import Change, ChangeEntry, ChangeImages, ChangeOp, PreviousVersion


def change_of(seq: int, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Change:
    op: ChangeOp = "insert" if before is None else "delete" if after is None else "replace"
    entry = ChangeEntry(
        database="d",
        collection="c",
        documentKey=f"d{seq}",
        op=op,
        before=msgspec.Raw(orjson.dumps(before)),
        after=msgspec.Raw(orjson.dumps(after)),
        images=ChangeImages("full", "full"),
        version=2,
        createdAt=0,
        prev=None if before is None else PreviousVersion(1, 0),
        txn=None,
        commitTime="",
    )
    return Change(entry, 0, seq, 0)
