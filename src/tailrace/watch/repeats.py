"""A request that comes again under its idempotency key: is it the same one, and what was its answer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson
import xxhash

from tailrace.common.errors import TailraceError
from tailrace.watch.view import WriteRow
from tailrace.watch.writes import Result, Write

_STATUSES: Final = {"insert": 201, "delete": 204}
# What the log says of a change, by what was asked for.
_OPS: Final = {"put": ("insert", "replace"), "patch": ("update",), "delete": ("delete",)}


def used_otherwise() -> TailraceError:
    """Whoever gets the answer of another request would take its own write for made."""
    return TailraceError("conflict", "this Idempotency-Key was used for another request")


def digest_of(write: Write) -> str:
    """The same for the same content, however it was spelled; empty if there is none."""
    if write.data is None:
        return ""
    try:
        content = orjson.dumps(write.data, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        raise TailraceError("invalid_json", "the document holds text that is not Unicode") from None
    return xxhash.xxh3_128_hexdigest(content)


def same_request(writes: Sequence[Write], others: Sequence[Write]) -> bool:
    """Whether both write the same to the same documents, in the same way."""
    asked, known = ([(one.op, one.path, digest_of(one)) for one in some] for some in (writes, others))
    return asked == known


def first_results(writes: Sequence[Write], made: Sequence[WriteRow]) -> list[Result]:
    """The results of the first time, write by write. Only what changed something is in the log."""
    rows, results = list(reversed(made)), list[Result]()
    for write in writes:
        path = f"{write.path.collection}/{write.path.id}"
        if rows and rows[-1].id == write.path.id and rows[-1].op in _OPS[write.op]:
            row = rows.pop()
            if row.digest and row.digest != digest_of(write):
                raise used_otherwise()
            results.append(Result(path, _STATUSES.get(row.op, 200), row.version, row.at_ms))
        else:
            refusal = TailraceError("conflict", "this write changed nothing when the request came first")
            results.append(Result(path, refusal.status, error=refusal))
    if rows:
        raise used_otherwise()
    return results
