"""Formats shared with matchers outside the server: Bloom filters, subscription summaries, deliveries.

A Bloom filter tells whether any subscription may use a value, without the index. It grows by segments of a
fixed number of keys. Keys cannot be removed; after many deletions or false positives a new filter is built.
A key that was added is always found.

A subscription summary is what an external matcher must know of a subscription. The read rule is included as
evaluated for the subscriber: only the claim values that it compares with remain.

A delivery is the result of external matching: a batch says which range of a partition was examined, with or
without matches. A gateway does not rely on batches being complete, in order, or sent once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import orjson
import xxhash

from tailrace.watch import cel
from tailrace.watch.cel import CelProgram, compile_cel
from tailrace.watch.evaluator import NotCompilableError, compile_truth
from tailrace.watch.matcher import Interest
from tailrace.watch.predicate import Predicate, PredicatePart

KEYS_PER_SEGMENT: Final = 65_536
BITS_PER_KEY: Final = 10
HASHES: Final = 7
SAMPLE_INTERVAL: Final = 256  # one lookup in this many is verified
SAMPLES_MIN: Final = 50
FALSE_POSITIVE_MAX: Final = 0.02
REBUILD_S: Final = 24 * 3600.0


def bloom_key(path: tuple[str, ...], value_class: object) -> bytes:
    """The key of a field and a value of `equality_class`."""
    return orjson.dumps([path, value_class])


class _Segment:
    __slots__ = ("bits", "count", "size")

    def __init__(self, keys: int) -> None:
        self.size = keys * BITS_PER_KEY
        self.bits = bytearray((self.size + 7) // 8)
        self.count = 0

    def add(self, first: int, step: int) -> None:
        bits, size = self.bits, self.size
        for number in range(HASHES):
            index = (first + number * step) % size
            bits[index >> 3] |= 1 << (index & 7)
        self.count += 1

    def holds(self, first: int, step: int) -> bool:
        bits, size = self.bits, self.size
        for number in range(HASHES):
            index = (first + number * step) % size
            if not bits[index >> 3] & 1 << (index & 7):
                return False
        return True


def _hashes(key: bytes) -> tuple[int, int]:
    both = xxhash.xxh3_128_intdigest(key)
    return both >> 64, (both & 0xFFFF_FFFF_FFFF_FFFF) | 1


class BloomFilter:
    """The filter of one collection."""

    def __init__(self, now_s: float, keys_each: int = KEYS_PER_SEGMENT) -> None:
        self._keys_each = keys_each
        self._segments = [_Segment(keys_each)]
        self._made_s = now_s
        self._discarded = 0
        self._lookups = 0
        self._samples = 0
        self._wrong = 0

    def __len__(self) -> int:
        return sum(segment.count for segment in self._segments)

    def __contains__(self, key: bytes) -> bool:
        first, step = _hashes(key)
        return any(segment.holds(first, step) for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        return sum(len(segment.bits) for segment in self._segments)

    @property
    def segments(self) -> list[bytes]:
        """The bits, for storage elsewhere."""
        return [bytes(segment.bits) for segment in self._segments]

    def add(self, key: bytes) -> None:
        if self._segments[-1].count >= self._keys_each:
            self._segments.append(_Segment(self._keys_each))
        self._segments[-1].add(*_hashes(key))

    def discard(self) -> None:
        """Count a deleted key; it is still found."""
        self._discarded += 1

    def is_sampled(self) -> bool:
        """Whether this lookup should be verified with `record_check`."""
        self._lookups += 1
        return self._lookups % SAMPLE_INTERVAL == 0

    def record_check(self, found: bool, really: bool) -> None:
        """Count false positives among absent keys."""
        if not really:
            self._samples += 1
            self._wrong += found

    @property
    def false_ratio(self) -> float:
        return self._wrong / self._samples if self._samples else 0.0

    def needs_rebuild(self, now_s: float) -> bool:
        """Whether this filter should be replaced."""
        if self._discarded * 2 > len(self):
            return True
        if self._samples >= SAMPLES_MIN and self.false_ratio > FALSE_POSITIVE_MAX:
            return True
        return now_s - self._made_s >= REBUILD_S

    def rebuilt(self, keys: Iterable[bytes], now_s: float) -> BloomFilter:
        """A new filter of the current keys."""
        fresh = BloomFilter(now_s, self._keys_each)
        for key in keys:
            fresh.add(key)
        return fresh


SUMMARIES_PREFIX: Final = "__subs__/"
SUMMARY_TTL_MS: Final = 90_000


class EncodedPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a predicate; `text` is set if the CEL library must evaluate it."""

    tree: list[Any]
    text: str | None = None
    variables: dict[str, Any] | None = None  # of a rule: variables besides the document


class SubscriptionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a matcher must know of one subscription."""

    database: str
    collection: str
    predicate: str
    predicateHash: str  # noqa: N815 - the name on the wire
    parts: list[EncodedPart]
    ruleInputs: EncodedPart | None  # noqa: N815 - as above
    documents: list[str] | None
    priority: str
    position: list[int]
    expires: int


def encode_predicate_part(part: PredicatePart) -> EncodedPart:
    try:
        compile_truth(part.node)
    except NotCompilableError:
        assert part.program is not None, "a part that cannot be compiled has a program"
        return EncodedPart(cel.encode_expression(part.node), part.program.source, part.variables)
    return EncodedPart(cel.encode_expression(part.node))


def decode_predicate_part(form: EncodedPart) -> PredicatePart:
    program: CelProgram | None = None
    if form.text is not None:
        program = compile_cel(form.text, rule=form.variables is not None)[1]
    return PredicatePart(cel.decode_expression(form.tree), program, form.variables)


def build_predicate(
    parts: Sequence[PredicatePart], rule: PredicatePart | None, documents: frozenset[str] | None
) -> Predicate:
    """The conjunction of query and rule, as in the gateway."""
    return Predicate([*parts, rule] if rule is not None else parts, documents)


def interest_from_summary(summary: SubscriptionSummary) -> Interest:
    """The subscription in the form of the matcher."""
    rule = None if summary.ruleInputs is None else decode_predicate_part(summary.ruleInputs)
    documents = None if summary.documents is None else frozenset(summary.documents)
    whole = build_predicate([decode_predicate_part(form) for form in summary.parts], rule, documents)
    return Interest(whole, None if rule is None else Predicate([rule]))


DELIVERIES_PREFIX: Final = "__deliveries__/"
LOOKAHEAD_RANGES: Final = 16  # overlapping ranges to search; otherwise the log is read
# Estimated memory of a range and of one of its keys.
RANGE_BYTES: Final = 200
RANGE_KEY_BYTES: Final = 150


class DeliveredMatch(msgspec.Struct, frozen=True):
    """The event of a change for one subscription."""

    key: str
    op: str
    reason: str


class DeliveredChange(msgspec.Struct, frozen=True):
    """A change with matches."""

    seq: int
    lsn: str
    op: str
    subs: list[DeliveredMatch]
    doc: dict[str, Any]


class DeliveryBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All matches in a range of a partition, both ends included."""

    v: int = 1
    database: str
    collection: str
    partition: int
    owner: str
    leaseEpoch: int = 0  # noqa: N815 - the name on the wire
    generation: int
    index: str = ""  # identifies the set of subscriptions
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
    """A batch; None for entries of other kinds, which readers skip."""
    return None if _decode_kind(raw).kind else _decode(raw)


class ExaminedRange(NamedTuple):
    """An examined range of a partition, with the matching changes by subscription."""

    partition: int
    first: int
    last: int
    as_of: int
    seqs: dict[str, tuple[int, ...]]
    size_bytes: int


class RelevantRange(NamedTuple):
    """The relevant changes up to `last`; `seqs` is None if the range was not examined."""

    last: int
    seqs: tuple[int, ...] | None


class ExaminedRanges:
    """The externally examined ranges of one collection.

    Subscriptions query by position, so the order, repetition and completeness of batches do not matter: where
    no range is known, the log is read.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._extents: dict[int, list[ExaminedRange]] = {}  # by partition, sorted by first
        self._epochs: dict[int, int] = {}  # highest lease epoch, by partition

    def add_batch(self, batch: DeliveryBatch) -> ExaminedRange | None:
        """Store the range of a batch; None if it is of another generation, of a fenced owner, or a repeat."""
        partition = batch.partition
        if batch.generation != self.generation or batch.leaseEpoch < self._epochs.get(partition, 0):
            return None
        if not 1 <= batch.first <= batch.last:
            return None
        self._epochs[partition] = batch.leaseEpoch
        extent = _range_of_batch(batch)
        known = self._extents.setdefault(partition, [])
        index = bisect_left(known, _range_key(extent), key=_range_key)
        if index < len(known) and _range_key(known[index]) == _range_key(extent):
            return None
        known.insert(index, extent)
        return extent

    def evict(self, extent: ExaminedRange) -> None:
        """Drop a range to free memory."""
        known = self._extents.get(extent.partition, [])
        index = bisect_left(known, _range_key(extent), key=_range_key)
        if index < len(known) and known[index] is extent:
            del known[index]

    def relevant_after(self, key: str, written: int, partition: int, after: int) -> RelevantRange | None:
        """The relevant changes after `after` for a subscription whose summary is entry `written`.

        Ranges that were matched with older summaries do not count. None if the log must be read.
        """
        known = self._extents.get(partition, [])
        index = bisect_right(known, after + 1, key=_range_first)
        for extent in reversed(known[max(0, index - LOOKAHEAD_RANGES) : index]):
            if extent.last > after and extent.as_of >= written:
                mine = extent.seqs.get(key, ())
                return RelevantRange(extent.last, tuple(seq for seq in mine if seq > after))
        for extent in known[index : index + LOOKAHEAD_RANGES]:
            if extent.as_of >= written:
                return RelevantRange(extent.first - 1, None)
        return None


def _range_of_batch(batch: DeliveryBatch) -> ExaminedRange:
    seqs: dict[str, list[int]] = {}
    for item in batch.items:
        if batch.first <= item.seq <= batch.last:
            for match in item.subs:
                seqs.setdefault(match.key, []).append(item.seq)
    found = {key: tuple(sorted(set(numbers))) for key, numbers in seqs.items()}
    size = RANGE_BYTES + sum(RANGE_KEY_BYTES + 8 * len(numbers) for numbers in found.values())
    return ExaminedRange(batch.partition, batch.first, batch.last, batch.asOf, found, size)


def _range_key(extent: ExaminedRange) -> tuple[int, int, int]:
    return extent.first, extent.last, extent.as_of


def _range_first(extent: ExaminedRange) -> int:
    return extent.first
