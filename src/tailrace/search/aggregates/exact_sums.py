"""Exact sums of many groups at once.

A sum is stored as two doubles: the nearest one, and the exact rest. Numbers of similar magnitude, as
measurements are, fit in that. A sum that does not is stored beside them as an integer multiple of 2 ** -1074.

To add, doubles are split into pieces of 32 bits, from the lowest bit that any of them has. Pieces of the same
position are added as 64-bit integers, which have room for 2 ** 30 of them. Numbers that are summed by several
groupings are split once.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tailrace.search.aggregates.measures import EXACT_SUM_SCALE, nearest_ratio, to_exact
from tailrace.search.numpy_arrays import np

PIECES_MAX: Final = 8  # of a sum; doubles further apart are added one by one
_BITS: Final = 32
_MASK: Final = (1 << _BITS) - 1
_MANTISSA: Final = 53
_ADDENDS_MAX: Final = 1 << (_MANTISSA - _BITS - 1)  # so many pieces add up in a double without an error


class SumArray(NamedTuple):
    """One sum a row. In rows of `beyond` the doubles are zero, and the sum is what lies there."""

    nearest: Any
    rests: Any
    beyond: dict[int, int]

    def total(self, row: int) -> int:
        """In units of 2 ** -1074."""
        found = self.beyond.get(row)
        return (
            to_exact(float(self.nearest[row])) + to_exact(float(self.rests[row])) if found is None else found
        )

    def take(self, rows: Any) -> SumArray:
        beyond: dict[int, int] = {}
        if self.beyond:
            beyond = {
                place: self.beyond[row] for place, row in enumerate(rows.tolist()) if row in self.beyond
            }
        return SumArray(self.nearest[rows], self.rests[rows], beyond)


class AddendArray(NamedTuple):
    """Numbers cut into pieces, as doubles: of each place, in units of 2 ** (low + 32 * place)."""

    pieces: Any
    low: int

    def take(self, places: Any) -> AddendArray:
        return AddendArray(self.pieces[:, places], self.low)


def split_addends(numbers: Any) -> AddendArray | None:
    """None if there are too many numbers, or they are too far apart."""
    if not 0 < len(numbers) <= _ADDENDS_MAX:
        return None
    if numbers.dtype == np.int64:
        pieces = np.stack([numbers & _MASK, numbers >> _BITS])
        return AddendArray(pieces.astype(np.float64), 0)
    some = numbers != 0
    if not some.any():
        return AddendArray(np.zeros((1, len(numbers))), 0)
    fractions, exponents = np.frexp(numbers)
    low = int(exponents[some].min()) - _MANTISSA
    count = _pieces(low, int(exponents[some].max()))
    if count > PIECES_MAX:
        return None
    held = np.zeros((len(numbers), count), np.int64)
    whole = (fractions * float(1 << _MANTISSA)).astype(np.int64)
    shifts = np.where(some, exponents.astype(np.int64) - _MANTISSA - low, 0)
    _add_pieces(held, np.arange(len(numbers)), whole, shifts)
    return AddendArray(np.ascontiguousarray(held.T.astype(np.float64)), low)


def sum_addends(addends: AddendArray, group_of: Any, groups: int) -> SumArray:
    """What `sums_of` makes of the numbers themselves."""
    return sums_from_addends(merge_addends(addends, group_of, groups))


def merge_addends(addends: AddendArray, group_of: Any, groups: int) -> AddendArray:
    """Pieces added up by the group of each; again and again, as long as all are of one cut."""
    added = [np.bincount(group_of, weights=pieces, minlength=groups) for pieces in addends.pieces]
    return AddendArray(np.stack(added), addends.low)


def sums_from_addends(added: AddendArray) -> SumArray:
    """The sums that pieces add up to."""
    count, groups = added.pieces.shape
    held = np.zeros((groups, count + 1), np.int64)  # one more for what is carried
    held[:, :count] = added.pieces.T
    _carry(held)
    return _halves(held, added.low)


def sum_by_group(numbers: Any, group_of: Any, groups: int) -> SumArray:
    """The sums of doubles or 64-bit integers, by the group of each."""
    if numbers.dtype != np.int64:
        return _added(numbers, group_of, groups)
    upper = (numbers >> _BITS).astype(np.float64) * float(1 << _BITS)
    lower = (numbers & _MASK).astype(np.float64)
    return _added(np.concatenate([upper, lower]), np.concatenate([group_of, group_of]), groups)


def merge_sums(sums: SumArray, group_of: Any, groups: int) -> SumArray:
    """Sums added up by the group of each."""
    halves = np.concatenate([sums.nearest, sums.rests])
    found = _added(halves, np.concatenate([group_of, group_of]), groups)
    for row, total in sums.beyond.items():
        _put(found, int(group_of[row]), found.total(int(group_of[row])) + total)
    return found


def concat_sums(parts: list[SumArray]) -> SumArray:
    """One behind the other."""
    beyond: dict[int, int] = {}
    at = 0
    for part in parts:
        beyond |= {at + row: total for row, total in part.beyond.items()}
        at += len(part.nearest)
    nearest, rests = (np.concatenate([part[half] for part in parts]) for half in (0, 1))
    return SumArray(nearest, rests, beyond)


def split_to_doubles(total: int) -> tuple[float, float] | None:
    """The two doubles that make up an exact sum; None if no two do."""
    try:
        nearest = total / (1 << EXACT_SUM_SCALE)
        left = total - to_exact(nearest)
        rest = left / (1 << EXACT_SUM_SCALE)
    except OverflowError:
        return None
    return (nearest, rest) if to_exact(rest) == left else None


def _put(sums: SumArray, row: int, total: int) -> None:
    halves = split_to_doubles(total)
    sums.nearest[row], sums.rests[row] = halves or (0.0, 0.0)
    sums.beyond.pop(row, None)
    if halves is None:
        sums.beyond[row] = total


def _added(doubles: Any, group_of: Any, groups: int) -> SumArray:
    some = doubles != 0
    if not some.all():
        doubles, group_of = doubles[some], group_of[some]
    if not len(doubles):
        return SumArray(np.zeros(groups), np.zeros(groups), {})
    fractions, exponents = np.frexp(doubles)
    low = int(exponents.min()) - _MANTISSA
    pieces = _pieces(low, int(exponents.max()))
    if pieces > PIECES_MAX:
        return _added_one_by_one(doubles, group_of, groups)
    held = np.zeros((groups, pieces), np.int64)
    whole = (fractions * float(1 << _MANTISSA)).astype(np.int64)
    _add_pieces(held, group_of, whole, exponents.astype(np.int64) - _MANTISSA - low)
    _carry(held)
    return _halves(held, low)


def _pieces(low: int, high: int) -> int:
    """Of numbers between two exponents; one of them for what is carried."""
    return (high - low) // _BITS + 3


def _add_pieces(held: Any, group_of: Any, whole: Any, shifts: Any) -> None:
    """Adds `whole << shift`. Of a negative number the upper half is negative and the lower one is not."""
    places, bits = shifts >> 5, shifts & (_BITS - 1)
    lower, upper = (whole & _MASK) << bits, (whole >> _BITS) << bits
    flat, at = held.reshape(-1), group_of * held.shape[1] + places
    np.add.at(flat, at, lower & _MASK)
    np.add.at(flat, at + 1, (lower >> _BITS) + (upper & _MASK))
    np.add.at(flat, at + 2, upper >> _BITS)


def _carry(held: Any) -> None:
    """Every piece but the last is between 0 and 2 ** 32 then."""
    for place in range(held.shape[1] - 1):
        held[:, place + 1] += held[:, place] >> _BITS
        held[:, place] &= _MASK


def _halves(held: Any, low: int) -> SumArray:
    """What the pieces add up to: an approximation, what it leaves, and whether that is all."""
    left = held.copy()
    first = _approximated(left, low)
    second = _approximated(left, low)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = first + second
        # Exact: both are there without an error, so rounding once gives the nearest double.
        back = nearest - first
        rests = (first - (nearest - back)) + (second - back)
    beyond: dict[int, int] = {}
    for row in np.flatnonzero(left.any(axis=1) | ~np.isfinite(nearest)).tolist():
        total = sum(piece << (_BITS * place) for place, piece in enumerate(held[row].tolist()))
        shift = low + EXACT_SUM_SCALE
        beyond[row] = total << shift if shift >= 0 else total >> -shift
    sums = SumArray(nearest, rests, {})
    for row, total in beyond.items():
        _put(sums, row, total)
    return sums


def _approximated(left: Any, low: int) -> Any:
    """About what the pieces add up to, which is then taken away from them."""
    with np.errstate(over="ignore"):
        about = left[:, -1].astype(np.float64)
        for place in range(left.shape[1] - 2, -1, -1):
            about = about * float(1 << _BITS) + left[:, place]
        about = np.ldexp(about, low)
    about[~np.isfinite(about)] = 0.0
    rows = np.flatnonzero(about)
    fractions, exponents = np.frexp(about[rows])
    whole = (fractions * float(1 << _MANTISSA)).astype(np.int64)
    shifts = exponents.astype(np.int64) - _MANTISSA - low
    below = np.maximum(-shifts, 0)  # bits that are zero: nothing has a lower one than the lowest of all
    _add_pieces(left, rows, -(whole >> below), np.maximum(shifts, 0))
    _carry(left)
    return about


def _added_one_by_one(doubles: Any, group_of: Any, groups: int) -> SumArray:
    totals: dict[int, int] = {}
    for group, number in zip(group_of.tolist(), doubles.tolist(), strict=True):
        totals[group] = totals.get(group, 0) + to_exact(number)
    sums = SumArray(np.zeros(groups), np.zeros(groups), {})
    for group, total in totals.items():
        _put(sums, group, total)
    return sums


def compute_averages(sums: SumArray, counts: Any) -> Any:
    """The doubles nearest to the exact averages; counts are at least 1."""
    with np.errstate(all="ignore"):
        sizes = counts.astype(np.float64)
        about = sums.nearest / sizes
        product, error = _product(about, sizes)
        left = ((sums.nearest - product) - error) + sums.rests
        more = left / sizes
        found = about + more
        # Where the sum is one double, it is divided as it should be. Elsewhere what lies near the middle of
        # two doubles, or might, is left to whole numbers. Below a power of two doubles are twice as near.
        is_plain = (sums.rests == 0) & (counts <= 1 << _MANTISSA)
        steps = np.abs(more) / (np.spacing(np.abs(about)) / 4)
        whole_steps = np.rint(steps)
        is_middle = (whole_steps % 4 == 2) | ((np.frexp(about)[0] == 0.5) & (whole_steps > 0))
        is_halved = counts & (counts - 1) == 0  # by powers of two, without an error
        is_near = is_middle & ~is_halved & (np.abs(steps - whole_steps) < 1e-6)
        size = np.abs(sums.nearest)
        is_usual = (size > 1e-200) & (size < 1e200) & (counts < 1 << 30) & (steps < 64)
    found = np.where(is_plain, about, found)
    doubtful = ~is_plain & (is_near | ~is_usual)
    for row in {*np.flatnonzero(doubtful).tolist(), *sums.beyond}:
        found[row] = nearest_ratio(sums.total(row), int(counts[row]) << EXACT_SUM_SCALE)
    return found


def _product(one: Any, other: Any) -> tuple[Any, Any]:
    """A product and the error of its rounding (Dekker)."""
    product = one * other
    (one_upper, one_lower), (other_upper, other_lower) = _split(one), _split(other)
    error = one_lower * other_lower - (
        ((product - one_upper * other_upper) - one_lower * other_upper) - one_upper * other_lower
    )
    return product, error


def _split(number: Any) -> tuple[Any, Any]:
    spread = number * 134217729.0  # 2 ** 27 + 1
    upper = spread - (spread - number)
    return upper, number - upper
