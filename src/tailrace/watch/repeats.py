"""A request that comes again under its idempotency key: is it the same one, and what was its answer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson
import xxhash

from tailrace.common.errors import TailraceError
from tailrace.watch.view import WriteRow
from tailrace.watch.writes import DocumentWrite, WriteResult

_STATUSES: Final = {"insert": 201, "delete": 204}
# What the log says of a change, by what was asked for.
_OPS: Final = {"put": ("insert", "replace"), "patch": ("update",), "delete": ("delete",)}


def idempotency_conflict() -> TailraceError:
    """Whoever gets the answer of another request would take its own write for made."""
    return TailraceError("conflict", "this Idempotency-Key was used for another request")


def write_digest(write: DocumentWrite) -> str:
    """The same for the same content, however it was spelled; empty if there is none."""
    if write.data is None:
        return ""
    try:
        content = orjson.dumps(write.data, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        raise TailraceError("invalid_json", "the document holds text that is not Unicode") from None
    return xxhash.xxh3_128_hexdigest(content)


def is_same_request(writes: Sequence[DocumentWrite], others: Sequence[DocumentWrite]) -> bool:
    """Whether both write the same to the same documents, in the same way."""
    asked, known = ([(one.op, one.path, write_digest(one)) for one in some] for some in (writes, others))
    return asked == known


def repeated_results(writes: Sequence[DocumentWrite], made: Sequence[WriteRow]) -> list[WriteResult]:
    """The results of the first time, write by write. Only what changed something is in the log."""
    rows, results = list(reversed(made)), list[WriteResult]()
    for write in writes:
        path = f"{write.path.collection}/{write.path.id}"
        if rows and rows[-1].id == write.path.id and rows[-1].op in _OPS[write.op]:
            row = rows.pop()
            if row.digest and row.digest != write_digest(write):
                raise idempotency_conflict()
            results.append(WriteResult(path, _STATUSES.get(row.op, 200), row.version, row.at_ms))
        else:
            refusal = TailraceError("conflict", "this write changed nothing when the request came first")
            results.append(WriteResult(path, refusal.status, error=refusal))
    if rows:
        raise idempotency_conflict()
    return results
