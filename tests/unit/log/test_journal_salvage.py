"""What is read of a damaged journal file: every record with a right checksum, and where the others were."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.journals import ID, append, create, flip, write_journal_file
from tailrace.log.journal import checksum_seed, crc32c_extend, file_path
from tailrace.log.journal_check import check_journal
from tailrace.log.journal_salvage import files_after, find_seed, read_pieces, solve_seed
from tailrace.log.records import Append, decode_record

COUNT = 30


@pytest.fixture
def written(tmp_path: Path) -> list[int]:
    """One file: a stream and its entries, each in a batch of its own."""
    records = [[create(1, "s")], *([append(1, number, b"entry %d" % number)] for number in range(1, COUNT))]
    return write_journal_file(tmp_path, 1, records, marked=True)


def read(directory: Path) -> tuple[list[int], int]:
    """The numbers of the entries that were read, and how many places are damaged."""
    [file] = files_after(directory, 0)
    found = list(read_pieces(file))
    ops = [op for piece in found if piece.payload is not None for op in decode_record(piece.payload)]
    entries = [op.first for op in ops if isinstance(op, Append)]
    return entries, sum(piece.payload is None for piece in found)


def test_a_sound_file_is_read_whole(tmp_path: Path, written: list[int]) -> None:
    assert read(tmp_path) == (list(range(1, COUNT)), 0)
    assert check_journal(tmp_path, 0).problems == []


@pytest.mark.parametrize("place", [0, 2, 5, 12])
def test_a_damaged_record_is_passed_over(tmp_path: Path, written: list[int], place: int) -> None:
    """Its length, its checksum or its body."""
    flip(file_path(tmp_path, 1), written[7] + place, 1)
    assert read(tmp_path) == ([number for number in range(1, COUNT) if number != 7], 1)
    [problem] = check_journal(tmp_path, 0).problems
    assert f"record at byte {written[7] - 17}" in problem.problem or f"byte {written[7]}" in problem.problem


def test_a_record_that_was_never_finished_is_dropped_as_by_recovery(
    tmp_path: Path, written: list[int]
) -> None:
    flip(file_path(tmp_path, 1), written[-2] + 12)
    assert read(tmp_path) == (list(range(1, COUNT - 1)), 0)
    check = check_journal(tmp_path, 0)
    assert (check.problems, check.torn) == ([], file_path(tmp_path, 1).name)


def test_a_file_without_its_first_sector(tmp_path: Path, written: list[int]) -> None:
    path = file_path(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(bytes(512) + data[512:])
    lost = sum(position < 512 for position in written) - 1
    assert find_seed(path.read_bytes()) == checksum_seed(ID + 1)
    assert read(tmp_path) == (list(range(lost + 1, COUNT)), 1)


def test_the_start_of_a_checksum_follows_from_one_record() -> None:
    chance = random.Random(1)
    for size in range(1, 100):
        seed, payload = chance.randrange(2**32), chance.randbytes(size)
        assert solve_seed(payload, crc32c_extend(seed, payload)) == seed


def test_a_missing_file_and_files_that_do_not_count(tmp_path: Path) -> None:
    first = write_journal_file(tmp_path, 1, [[create(1, "s")], [append(1, 1, b"a")]])
    write_journal_file(tmp_path, 2, [[append(1, 2, b"void")]], previous=(1, first[-1]))
    third = write_journal_file(tmp_path, 3, [[append(1, 2, b"b")]], previous=(1, first[-1]))
    write_journal_file(tmp_path, 5, [[append(1, 3, b"c")]], previous=(4, 100))
    assert [file.seq for file in files_after(tmp_path, 0)] == [1, 3, 5]
    assert [file.end for file in files_after(tmp_path, 0)] == [first[-1], None, None]
    assert third
    check = check_journal(tmp_path, 0)
    assert ["file 4 is missing" in problem.problem for problem in check.problems] == [True]
    assert check_journal(tmp_path, 4).problems == []
