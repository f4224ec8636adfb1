"""Checkpoints and pushed rows of replicating clients: parsing, signing and conflict detection.

Checkpoints of replicating clients: how far a walk over the changes of a collection has come.

The place is a number for each partition, in the order in which changes were committed. Time says nothing:
writes may commit late, and clocks may be set back. What a client keeps is a small object with a signed text,
which it need not understand.

What becomes of a document that a replicating client pushes: decided on user content alone.

A client does not know what the server stamps on its documents. After a push it assumes that the server has
what it sent, so comparing versions or times would find conflicts where there are none.
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
# A client without a signed place says a time; what was stamped shortly before may have come later.
LATE_MS: Final = 5000
_MEMBERS: Final = frozenset({"updatedAt", "id", "pos"})


class PullCursor(msgspec.Struct, frozen=True, array_like=True):
    """Everything up to `seqs` was sent.

    `began` is where the tail was when the walk began: the client cannot have what was hidden before. `held`
    is what the client has from an earlier walk. Both are empty once the walk is past them.
    """

    database: str
    collection: str
    generation: int
    digest: bytes  # of the read rule, and of what it sees of the asker
    seqs: list[int]
    began: list[int]
    held: list[int]

    def moved(self, seqs: Sequence[int], *, began: list[int] | None = None) -> PullCursor:
        return msgspec.structs.replace(
            self,
            seqs=list(seqs),
            began=_ahead(self.began if began is None else began, seqs),
            held=_ahead(self.held, seqs),
        )

    def again(self, digest: bytes) -> PullCursor:
        """From the start, since other documents may be readable now; those that are not are taken back."""
        count = len(self.seqs)
        held = [max(pair) for pair in zip(self.seqs, self.held or [0] * count, strict=True)]
        return msgspec.structs.replace(self, digest=digest, seqs=[0] * count, began=[], held=held)

    def is_new(self, partition: int, seq: int) -> bool:
        """Whether it changed after the walk began, so that the client may have what was there before."""
        return not self.began or seq > self.began[partition]

    def misses(self, purged: Sequence[int]) -> bool:
        """Whether a tombstone that the client needs is gone: `purged` has the newest of each partition.

        What was deleted before the walk began the client cannot have, unless from an earlier walk.
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
    """What a client says it has: a walk, or as little as a time."""

    updated_ms: int
    id: str
    walk: PullCursor | None


def read_checkpoint(given: object, signer: TokenSigner) -> Checkpoint | None:
    """None is the beginning."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _invalid("it is an object, or null")
    found = cast("dict[str, Any]", given)
    updated_ms, document_id, pos = found.get("updatedAt"), found.get("id"), found.get("pos")
    if not set(found) <= _MEMBERS:
        raise _invalid("it has updatedAt, id and pos")
    if type(updated_ms) is not int or not 0 <= updated_ms < 2**53 or not isinstance(document_id, str):
        raise _invalid("updatedAt is a time in milliseconds, id a text")
    if pos is None:
        return Checkpoint(updated_ms, document_id, None)
    walk = signer.read(CURSOR_KIND, pos, PullCursor)
    if walk is None:
        raise _invalid("pos is what an answer before gave")
    return Checkpoint(updated_ms, document_id, walk)


def encode_checkpoint(
    walk: PullCursor, updated_ms: int, document_id: str, signer: TokenSigner
) -> dict[str, Any]:
    """Always all three: clients lay a new checkpoint over the old one, member by member."""
    return {"updatedAt": updated_ms, "id": document_id, "pos": signer.sign(CURSOR_KIND, walk)}


def _invalid(what: str) -> TailraceError:
    return TailraceError("invalid_checkpoint", f"the checkpoint cannot be read: {what}")


def checkpoint_expired(why: str) -> TailraceError:
    return TailraceError("checkpoint_expired", f"{why}: clear the collection and replicate it anew")


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
