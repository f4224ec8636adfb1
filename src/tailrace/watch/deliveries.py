"""Deliveries: match results that come to a gateway from outside its process, and what it makes of them.

A batch says which range of a partition was examined, matches or not. From that a gateway knows what it has
missed: it believes nobody that batches are complete, in order, or sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

DELIVERIES: Final = "__deliveries__/"


class Told(msgspec.Struct, frozen=True):
    """What a change is to one subscription."""

    key: str
    op: str
    reason: str


class Item(msgspec.Struct, frozen=True):
    """A change that concerns somebody."""

    seq: int
    lsn: str
    op: str
    subs: list[Told]
    doc: dict[str, Any]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a matcher found between two numbers of a partition, both included."""

    v: int = 1
    database: str
    collection: str
    partition: int
    owner: str
    leaseEpoch: int = 0  # noqa: N815 - the name on the wire
    generation: int
    index: str = ""  # the set of subscriptions that was matched
    first: int = msgspec.field(name="from")
    last: int = msgspec.field(name="to")
    mode: str = "directed"
    items: list[Item]


_decode = msgspec.json.Decoder(Batch).decode
encode = msgspec.json.Encoder().encode


class _Kind(msgspec.Struct):
    kind: str = ""


_decode_kind = msgspec.json.Decoder(_Kind).decode


def decode(raw: bytes) -> Batch | None:
    """A batch; None for entries of other kinds, which readers pass over."""
    return None if _decode_kind(raw).kind else _decode(raw)


class Hole(NamedTuple):
    """What nobody told these subscriptions about: the gateway reads it in the log itself."""

    keys: tuple[str, ...]
    partition: int
    first: int
    last: int


class Event(NamedTuple):
    """To be sent to a subscription now."""

    key: str
    partition: int
    told: Told
    item: Item


Step = Hole | Event


class Contiguity:
    """The gateway's check of one collection: every event once, in order, whatever became of the batches.

    A subscription counts from when it is known to be in the set that is matched, at its own positions. What
    `take` answers is to be done in order: first holes are closed, then events are sent.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._reached: dict[str, list[int]] = {}
        self._epochs: dict[int, int] = {}  # highest lease epoch, by partition

    def include(self, key: str, positions: Sequence[int]) -> None:
        self._reached[key] = list(positions)

    def exclude(self, key: str) -> None:
        self._reached.pop(key, None)

    def reached(self, key: str) -> list[int]:
        """Everything up to these was sent to the subscription."""
        return list(self._reached[key])

    def take(self, batch: Batch) -> list[Step]:
        """What a batch asks for. One of another generation, or of somebody who has lost the partition, is
        about nothing that would still have to be sent."""
        partition = batch.partition
        if batch.generation != self.generation or batch.leaseEpoch < self._epochs.get(partition, 0):
            return []
        self._epochs[partition] = batch.leaseEpoch
        behind = self._behind(partition, batch.last)
        steps: list[Step] = list(_holes(behind, partition, batch.first - 1))
        for item in sorted(batch.items, key=lambda one: one.seq):
            if batch.first <= item.seq <= batch.last:
                steps += [
                    Event(told.key, partition, told, item)
                    for told in item.subs
                    if item.seq > behind.get(told.key, item.seq)
                ]
        self._advance(behind, partition, batch.last)
        return steps

    def finish(self, partition: int, upto: int) -> list[Step]:
        """No more batches come: the rest of the partition is read in the log."""
        behind = self._behind(partition, upto)
        steps: list[Step] = list(_holes(behind, partition, upto))
        self._advance(behind, partition, upto)
        return steps

    def _behind(self, partition: int, upto: int) -> dict[str, int]:
        return {key: seqs[partition] for key, seqs in self._reached.items() if seqs[partition] < upto}

    def _advance(self, behind: dict[str, int], partition: int, upto: int) -> None:
        for key in behind:
            self._reached[key][partition] = upto


def _holes(behind: dict[str, int], partition: int, upto: int) -> list[Hole]:
    """Up to `upto` there is no batch; those who stand at the same place read together."""
    by_place: dict[int, list[str]] = {}
    for key, seq in behind.items():
        if seq < upto:
            by_place.setdefault(seq, []).append(key)
    return [Hole(tuple(keys), partition, seq + 1, upto) for seq, keys in sorted(by_place.items())]
