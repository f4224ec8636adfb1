"""Checkpoints and pushed rows of replicating clients: parsing, signing and conflict detection.

A checkpoint holds a signed cursor: the position in each partition in commit order. Times are not sufficient:
writes may commit late, and clocks may be set back. To the client the signed text is opaque.

Conflicts are decided on user content alone. A client does not know the fields that the server adds. After a
push it assumes that the server has what it sent, so comparing versions or times would find false conflicts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.watch import document
from tailrace.watch.document import RESERVED_FIELDS, Document
from tailrace.watch.resume_tokens import TokenSigner

CURSOR_KIND: Final = b"walk:"
# A client without a cursor sends a time; changes stamped shortly before may have committed later.
LATE_MS: Final = 5000
_MEMBERS: Final = frozenset({"updatedAt", "id", "pos"})


class PullCursor(msgspec.Struct, frozen=True, array_like=True):
    """The position of a client: everything up to `seqs` was sent.

    `began` is the end of the log when the cursor was created: the client cannot have documents that were
    hidden before. `held` is what the client has from an earlier cursor. Both are empty once `seqs` is past
    them.
    """

    database: str
    collection: str
    generation: int
    digest: bytes  # of the read rule and the claims it uses
    seqs: list[int]
    began: list[int]
    held: list[int]

    def advanced(self, seqs: Sequence[int], *, began: list[int] | None = None) -> PullCursor:
        return msgspec.structs.replace(
            self,
            seqs=list(seqs),
            began=_ahead(self.began if began is None else began, seqs),
            held=_ahead(self.held, seqs),
        )

    def restarted(self, digest: bytes) -> PullCursor:
        """Restart because the readable documents changed; those no longer readable are sent as deleted."""
        count = len(self.seqs)
        held = [max(pair) for pair in zip(self.seqs, self.held or [0] * count, strict=True)]
        return msgspec.structs.replace(self, digest=digest, seqs=[0] * count, began=[], held=held)

    def changed_since_start(self, partition: int, seq: int) -> bool:
        """Whether the change is newer than the cursor, so that the client may have an older version."""
        return not self.began or seq > self.began[partition]

    def misses(self, purged: Sequence[int]) -> bool:
        """Whether a tombstone that the client needs was purged; `purged` is the newest per partition.

        The client cannot have documents deleted before the cursor was created, except from an earlier one.
        """
        nothing = [0] * len(self.seqs)
        began, held = self.began or nothing, self.held or nothing
        return any(
            (seq or had) and max(seq, begun, had) < gone
            for seq, begun, had, gone in zip(self.seqs, began, held, purged, strict=True)
        )


def _ahead(vector: list[int], seqs: Sequence[int]) -> list[int]:
    return vector if any(map(int.__gt__, vector, seqs)) else []


class Checkpoint(NamedTuple):
    """The position of a client: a cursor, or only a time."""

    updated_ms: int
    id: str
    cursor: PullCursor | None


def read_checkpoint(value: object, signer: TokenSigner) -> Checkpoint | None:
    """Parse a checkpoint; None is the beginning."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _invalid("must be an object or null")
    found = cast("dict[str, Any]", value)
    updated_ms, document_id, pos = found.get("updatedAt"), found.get("id"), found.get("pos")
    if not set(found) <= _MEMBERS:
        raise _invalid("must have only updatedAt, id and pos")
    if type(updated_ms) is not int or not 0 <= updated_ms < 2**53 or not isinstance(document_id, str):
        raise _invalid("updatedAt must be Unix milliseconds, id a string")
    if pos is None:
        return Checkpoint(updated_ms, document_id, None)
    cursor = signer.read(CURSOR_KIND, pos, PullCursor)
    if cursor is None:
        raise _invalid("pos must be taken unchanged from an earlier response")
    return Checkpoint(updated_ms, document_id, cursor)


def encode_checkpoint(
    cursor: PullCursor, updated_ms: int, document_id: str, signer: TokenSigner
) -> dict[str, Any]:
    """Always all three members: clients merge a new checkpoint into the old one."""
    return {"updatedAt": updated_ms, "id": document_id, "pos": signer.sign(CURSOR_KIND, cursor)}


def _invalid(what: str) -> TailraceError:
    return TailraceError("invalid_checkpoint", f"invalid checkpoint: {what}")


def checkpoint_expired(why: str) -> TailraceError:
    return TailraceError("checkpoint_expired", f"{why}: clear the collection and replicate it again")


DELETED_FIELD: Final = "_deleted"
_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")

# same: nothing to do. insert, replace: write it. conflict: return the current document to the client.
PushVerdict = Literal["same", "insert", "replace", "conflict"]


class PushRow(NamedTuple):
    """One document of a push: the new state, and the state the client assumes on the server."""

    id: str
    content: Document
    deleted: bool
    assumed: Document | None
    assumed_deleted: bool


def check_deleted_field(name: object) -> str:
    """Validate the name of the field that marks deleted documents."""
    if not isinstance(name, str) or not _FIELD.match(name) or name in RESERVED_FIELDS - {"deleted"}:
        raise TailraceError(
            "invalid_request", "deletedField must be a field name that the server does not reserve"
        )
    return name


def read_push_rows(value: object, rows_max: int, deleted_field: str) -> list[PushRow]:
    if not isinstance(value, list):
        raise TailraceError("invalid_request", "rows must be a list")
    items = cast("list[object]", value)
    if len(items) > rows_max:
        raise TailraceError("payload_too_large", f"a push may have at most {rows_max} rows")
    return [_row(item, index, deleted_field) for index, item in enumerate(items)]


def _row(item: object, index: int, deleted_field: str) -> PushRow:
    row = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    new, assumed = row.get("newDocumentState"), row.get("assumedMasterState")
    if not isinstance(new, dict) or not (assumed is None or isinstance(assumed, dict)):
        raise TailraceError(
            "invalid_request",
            f"row {index}: newDocumentState must be an object, assumedMasterState an object or null",
        )
    state, old = cast("Document", new), cast("Document | None", assumed)
    document_id = state.get("id")
    if not isinstance(document_id, str):
        raise TailraceError("invalid_request", f"row {index}: id must be a string")
    return PushRow(
        document_id,
        user_content(state, deleted_field),
        _is_deleted(state, index, deleted_field),
        None if old is None else user_content(old, deleted_field),
        old is not None and _is_deleted(old, index, deleted_field),
    )


def _is_deleted(state: Document, index: int, deleted_field: str) -> bool:
    deleted = state.get(deleted_field, False)
    if type(deleted) is not bool:
        raise TailraceError("invalid_request", f"row {index}: {deleted_field} must be true or false")
    return deleted


def user_content(state: Document, deleted_field: str) -> Document:
    """The document without the server's fields, with normalized numbers."""
    content = {
        name: value
        for name, value in state.items()
        if name not in RESERVED_FIELDS and name != deleted_field and not name.startswith("_")
    }
    return document.check(content)


def decide_push(current: Document | None, deleted: bool, row: PushRow) -> PushVerdict:
    """`current` is the user content on the server, None if the document never existed."""
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
    """JSON equality. Numbers are compared as doubles, the only numbers of JavaScript clients."""
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
    """None for values that are not numbers; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
