"""Checkpoints of replicating clients: how far a walk over the changes of a collection has come.

The place is a number for each partition, in the order in which changes were committed. Time says nothing:
writes may commit late, and clocks may be set back. What a client keeps is a small object with a signed text,
which it need not understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.watch.tokens import TokenSigner

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
