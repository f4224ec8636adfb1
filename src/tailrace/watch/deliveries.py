"""Deliveries: match results that come to a gateway from outside its process, and what it makes of them.

A batch says which range of a partition was examined, matches or not. From that a gateway knows what it has
missed: it believes nobody that batches are complete, in order, or sent once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Final, NamedTuple

import msgspec

DELIVERIES_PREFIX: Final = "__deliveries__/"
LOOKAHEAD_RANGES: Final = 16  # that may overlap; what is not found among them is read in the log
# About what an extent and a key of it take in memory.
RANGE_BYTES: Final = 200
RANGE_KEY_BYTES: Final = 150


class DeliveredMatch(msgspec.Struct, frozen=True):
    """What a change is to one subscription."""

    key: str
    op: str
    reason: str


class DeliveredChange(msgspec.Struct, frozen=True):
    """A change that concerns somebody."""

    seq: int
    lsn: str
    op: str
    subs: list[DeliveredMatch]
    doc: dict[str, Any]


class DeliveryBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a matcher found between two numbers of a partition, both included."""

    v: int = 1
    database: str
    collection: str
    partition: int
    owner: str
    leaseEpoch: int = 0  # noqa: N815 - the name on the wire
    generation: int
    index: str = ""  # the set of subscriptions that was matched
    asOf: int = 0  # noqa: N815 - entry of the gateway's summaries up to which it was read
    first: int = msgspec.field(name="from")
    last: int = msgspec.field(name="to")
    mode: str = "directed"
    items: list[DeliveredChange]


_decode = msgspec.json.Decoder(DeliveryBatch).decode
encode_delivery = msgspec.json.Encoder().encode


class _DeliveryKind(msgspec.Struct):
    kind: str = ""


_decode_kind = msgspec.json.Decoder(_DeliveryKind).decode


def decode_delivery(raw: bytes) -> DeliveryBatch | None:
    """A batch; None for entries of other kinds, which readers pass over."""
    return None if _decode_kind(raw).kind else _decode(raw)


class ExaminedRange(NamedTuple):
    """A stretch of a partition that somebody has examined, and which of its changes concern whom."""

    partition: int
    first: int
    last: int
    as_of: int
    seqs: dict[str, tuple[int, ...]]
    size_bytes: int


class RelevantRange(NamedTuple):
    """The way on from a place, up to `last`: what of it concerns the asker, or None if nobody has looked."""

    last: int
    seqs: tuple[int, ...] | None


class ExaminedRanges:
    """What was examined of one collection by others than the gateway.

    Whoever is behind asks for the way on from where it stands, so it makes no difference in which order
    batches come, how often, or whether they come at all: where there is none, the log is read.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._extents: dict[int, list[ExaminedRange]] = {}  # by partition, in the order of where they begin
        self._epochs: dict[int, int] = {}  # highest lease epoch, by partition

    def take(self, batch: DeliveryBatch) -> ExaminedRange | None:
        """Keeps what a batch says. One of another generation, of somebody who has lost the partition, or one
        that was here before says nothing."""
        partition = batch.partition
        if batch.generation != self.generation or batch.leaseEpoch < self._epochs.get(partition, 0):
            return None
        if not 1 <= batch.first <= batch.last:
            return None
        self._epochs[partition] = batch.leaseEpoch
        extent = _range_of_batch(batch)
        known = self._extents.setdefault(partition, [])
        place = bisect_left(known, _range_key(extent), key=_range_key)
        if place < len(known) and _range_key(known[place]) == _range_key(extent):
            return None
        known.insert(place, extent)
        return extent

    def drop(self, extent: ExaminedRange) -> None:
        """There is no room for it any more."""
        known = self._extents.get(extent.partition, [])
        place = bisect_left(known, _range_key(extent), key=_range_key)
        if place < len(known) and known[place] is extent:
            del known[place]

    def ahead(self, key: str, written: int, partition: int, after: int) -> RelevantRange | None:
        """The way on behind `after`, for a subscription that was written down at `written`: whoever had not
        read that far has not examined anything for it. None if there is nothing but the log."""
        known = self._extents.get(partition, [])
        place = bisect_right(known, after + 1, key=_range_first)
        for extent in reversed(known[max(0, place - LOOKAHEAD_RANGES) : place]):
            if extent.last > after and extent.as_of >= written:
                mine = extent.seqs.get(key, ())
                return RelevantRange(extent.last, tuple(seq for seq in mine if seq > after))
        for extent in known[place : place + LOOKAHEAD_RANGES]:
            if extent.as_of >= written:
                return RelevantRange(extent.first - 1, None)
        return None


def _range_of_batch(batch: DeliveryBatch) -> ExaminedRange:
    seqs: dict[str, list[int]] = {}
    for item in batch.items:
        if batch.first <= item.seq <= batch.last:
            for told in item.subs:
                seqs.setdefault(told.key, []).append(item.seq)
    found = {key: tuple(sorted(set(numbers))) for key, numbers in seqs.items()}
    size = RANGE_BYTES + sum(RANGE_KEY_BYTES + 8 * len(numbers) for numbers in found.values())
    return ExaminedRange(batch.partition, batch.first, batch.last, batch.asOf, found, size)


def _range_key(extent: ExaminedRange) -> tuple[int, int, int]:
    return extent.first, extent.last, extent.as_of


def _range_first(extent: ExaminedRange) -> int:
    return extent.first
