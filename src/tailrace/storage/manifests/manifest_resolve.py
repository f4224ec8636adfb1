"""What a head becomes when a snapshot of its stream is recorded. Pure: the same input, the same head."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.storage.manifests.model import (
    CONFIGURATION_FIELDS,
    TAIL_STATE_FIELDS,
    HeadTombstone,
    ManifestConflictError,
    ManifestHead,
    StreamDeletedError,
    StreamFacts,
)


def first_head(facts: StreamFacts, fence: int, generation: int = 0) -> ManifestHead:
    """A stream of which nothing is recorded. A fork's own entries begin behind what it inherits."""
    return ManifestHead(
        stream_id=facts.stream_id,
        tail=facts.fork_entry,
        uploaded_through=facts.fork_entry,
        fence=fence,
        generation=generation,
        **_select_fields(facts, CONFIGURATION_FIELDS),
    )


def base_head(facts: StreamFacts, current: ManifestHead | None, fence: int) -> ManifestHead:
    """The head to build on. A name that is used again long after may get the same folder."""
    if current is None:
        return first_head(facts, fence)
    if current.deleted is None:
        _refuse_foreign_stream(facts, current, fence)
        return current
    if is_later_incarnation(facts, current, current.deleted):
        return first_head(facts, fence, current.generation)
    raise StreamDeletedError(facts.stream_id, f"it was {current.deleted.reason} and takes nothing more")


def is_later_incarnation(facts: StreamFacts, current: ManifestHead, deleted: HeadTombstone) -> bool:
    """Whether a stream is not the one of the tombstone but uses its name again.

    By the clock it was created later. A clock that was set back may say otherwise; then it is another stream
    if it was created at another time than the one that was buried.
    """
    return facts.created_ns > deleted.at_ns or facts.created_ns != current.created_ns


def _refuse_foreign_stream(facts: StreamFacts, current: ManifestHead, fence: int) -> None:
    """Of one owner there is one stream of a name at a time: this one was made by a copy of us."""
    if current.fence == fence and current.created_ns != facts.created_ns:
        message = f"another stream {facts.name!r} is recorded, which was created elsewhere"
        raise ManifestConflictError(facts.stream_id, message)


def is_same_incarnation(facts: StreamFacts, head: ManifestHead) -> bool:
    """Whether a head of another fence speaks of the very stream we have.

    No two servers create one in the same nanosecond, and a server that restores it begins a new epoch. So
    this is ours from before somebody took the bucket over without restoring it.
    """
    return facts.created_ns == head.created_ns and facts.epochs == head.epochs


def is_older_snapshot(facts: StreamFacts, base: ManifestHead, fence: int) -> bool:
    """Whether a newer snapshot of the same owner is recorded already. Owners do not share their numbers."""
    return base.fence == fence and facts.as_of < base.as_of


def is_newest_tail_state(facts: StreamFacts, base: ManifestHead, head: ManifestHead, fence: int) -> bool:
    """Whether closed state, producers and the like are those of the last recorded entry, and the newest."""
    grown = head.uploaded_through > base.uploaded_through
    return facts.tail == head.uploaded_through and (grown or not is_older_snapshot(facts, base, fence))


def with_facts(facts: StreamFacts, base: ManifestHead, head: ManifestHead, fence: int) -> ManifestHead:
    changes: dict[str, Any] = {}
    if not is_older_snapshot(facts, base, fence):
        changes |= _select_fields(facts, CONFIGURATION_FIELDS)
    if is_newest_tail_state(facts, base, head, fence):
        changes |= _select_fields(facts, TAIL_STATE_FIELDS)
    return msgspec.structs.replace(head, **changes)


def tombstone_head(
    facts: StreamFacts, current: ManifestHead | None, fence: int, at_ns: int, reason: str
) -> ManifestHead:
    """What remains of a stream. A tombstone stays the first one; a later life of the name is not touched."""
    base = first_head(facts, fence) if current is None else current
    at_ns = max(at_ns, facts.created_ns)
    if base.deleted is not None or base.created_ns > at_ns:
        return base
    _refuse_foreign_stream(facts, base, fence)
    epoch = max(base.epoch, facts.epochs[-1][0])
    return msgspec.structs.replace(
        base,
        created_ns=facts.created_ns,
        deleted=HeadTombstone(at_ns=at_ns, reason=reason, epoch=epoch),
        pages=(),
        segments=(),
        producers_key=None,
        producers_sha256="",
        meta_keys=(),
        companion_pages=(),
        companions=(),
        retired=(),
        replaced=(),
    )


def _select_fields(facts: StreamFacts, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in names}
