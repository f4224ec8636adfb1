"""What becomes of a document that a replicating client pushes: decided on user content alone.

A client does not know what the server stamps on its documents. After a push it assumes that the server has
what it sent, so comparing versions or times would find conflicts where there are none.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, NamedTuple, cast

from tailrace.common.errors import TailraceError
from tailrace.watch import document
from tailrace.watch.document import RESERVED_FIELDS, Document

DELETED_FIELD: Final = "_deleted"
_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")

# same: there is nothing to do. insert, replace: goes ahead. conflict: the client has to look at what there
# is.
PushVerdict = Literal["same", "insert", "replace", "conflict"]


class PushRow(NamedTuple):
    """One document of a push: what the client wants, and what it believes there is."""

    id: str
    content: Document
    deleted: bool
    assumed: Document | None
    assumed_deleted: bool


def check_deleted_field(name: object) -> str:
    """The name of the field that marks deleted documents; none of the other names of the server."""
    if not isinstance(name, str) or not _FIELD.match(name) or name in RESERVED_FIELDS - {"deleted"}:
        raise TailraceError(
            "invalid_request", "deletedField is the name of a field that is not one of the server's"
        )
    return name


def read_push_rows(given: object, rows_max: int, deleted_field: str) -> list[PushRow]:
    if not isinstance(given, list):
        raise TailraceError("invalid_request", "rows is a list")
    items = cast("list[object]", given)
    if len(items) > rows_max:
        raise TailraceError("payload_too_large", f"a push has at most {rows_max} rows")
    return [_row(item, place, deleted_field) for place, item in enumerate(items)]


def _row(item: object, place: int, deleted_field: str) -> PushRow:
    row = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    wanted, assumed = row.get("newDocumentState"), row.get("assumedMasterState")
    if not isinstance(wanted, dict) or not (assumed is None or isinstance(assumed, dict)):
        raise TailraceError(
            "invalid_request", f"row {place}: it has newDocumentState, and assumedMasterState or null"
        )
    new, old = cast("Document", wanted), cast("Document | None", assumed)
    document_id = new.get("id")
    if not isinstance(document_id, str):
        raise TailraceError("invalid_request", f"row {place}: the id of a document is a text")
    return PushRow(
        document_id,
        user_content(new, deleted_field),
        _is_deleted(new, place, deleted_field),
        None if old is None else user_content(old, deleted_field),
        old is not None and _is_deleted(old, place, deleted_field),
    )


def _is_deleted(state: Document, place: int, deleted_field: str) -> bool:
    deleted = state.get(deleted_field, False)
    if type(deleted) is not bool:
        raise TailraceError("invalid_request", f"row {place}: {deleted_field} is true or false")
    return deleted


def user_content(state: Document, deleted_field: str) -> Document:
    """The document without what is the server's, its numbers in the two forms there are."""
    kept = {
        name: value
        for name, value in state.items()
        if name not in RESERVED_FIELDS and name != deleted_field and not name.startswith("_")
    }
    return document.check(kept)


def decide_push(current: Document | None, deleted: bool, row: PushRow) -> PushVerdict:
    """`current` is the user content of what there is, None if there never was anything."""
    lives = current is not None and not deleted
    if lives and not row.deleted and json_equal(current, row.content):
        return "same"
    if current is not None and deleted and row.deleted:
        return "same"
    if not lives and (row.assumed is None or row.assumed_deleted):
        return "insert"
    if lives and row.assumed is not None and not row.assumed_deleted and json_equal(current, row.assumed):
        return "replace"
    return "conflict"


def json_equal(one: Any, other: Any) -> bool:
    """Equal as JSON. Numbers are equal if their doubles are: clients in JavaScript have no others."""
    number, number_other = _number(one), _number(other)
    if isinstance(one, dict) and isinstance(other, dict):
        left, right = cast("Document", one), cast("Document", other)
        return left.keys() == right.keys() and all(
            json_equal(value, right[name]) for name, value in left.items()
        )
    if isinstance(one, list) and isinstance(other, list):
        mine, theirs = cast("list[Any]", one), cast("list[Any]", other)
        return len(mine) == len(theirs) and all(map(json_equal, mine, theirs))
    return one == other if number is None and number_other is None else number == number_other


def _number(value: object) -> float | None:
    """Truth values are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
