"""A request that comes again under its idempotency key: is it the same one, and what was its answer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tailrace.api.watch.writes import Result, Write
from tailrace.errors import TailraceError
from tailrace.watch.view import WriteRow

_STATUSES: Final = {"insert": 201, "delete": 204}
# What the log says of a change, by what was asked for.
_OPS: Final = {"put": ("insert", "replace"), "patch": ("update",), "delete": ("delete",)}


def used_otherwise() -> TailraceError:
    """Whoever gets the answer of another request would take its own write for made."""
    return TailraceError("conflict", "this Idempotency-Key was used for another request")


def same_request(writes: Sequence[Write], others: Sequence[Write]) -> bool:
    """Whether both are about the same documents, in the same way."""
    return [(one.op, one.path) for one in writes] == [(one.op, one.path) for one in others]


def first_results(writes: Sequence[Write], made: Sequence[WriteRow]) -> list[Result]:
    """The results of the first time, write by write. Only what changed something is in the log."""
    rows, results = list(reversed(made)), list[Result]()
    for write in writes:
        path = f"{write.path.collection}/{write.path.id}"
        if rows and rows[-1].id == write.path.id and rows[-1].op in _OPS[write.op]:
            row = rows.pop()
            results.append(Result(path, _STATUSES.get(row.op, 200), row.version, row.at_ms))
        else:
            refusal = TailraceError("conflict", "this write changed nothing when the request came first")
            results.append(Result(path, refusal.status, error=refusal))
    if rows:
        raise used_otherwise()
    return results
