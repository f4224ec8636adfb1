"""Replay after damage: a torn tail is dropped, anything else is refused with a message that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from apsw import BusyError

from support.journals import ID, append, create, flip, write_journal_file
from tailrace.log.journal import (
    HEADER,
    HEADER_BYTES,
    MARK_BYTES,
    Journal,
    JournalCorruptError,
    checksum_seed,
    encode_mark,
    file_path,
    frame_record,
)
from tailrace.log.model import Stream
from tailrace.log.records import Op, encode_record
from tailrace.log.recovery import replay_journal
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.checkpointer import checkpoint_file

LINES = [b"first", b"second", b"third", b"fourth"]
RECORDS: list[Sequence[Op]] = [[create(1, "a"), append(1, 1, LINES[0])]]
RECORDS.extend([append(1, entry, line)] for entry, line in enumerate(LINES[1:], 2))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredStreams]:
    stored = StoredStreams(tmp_path / "hot.db")
    yield stored
    stored.db.close()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def tail(journal: Path, store: StoredStreams) -> int:
    """How many lines recovery brings back."""
    stream = replay_journal(journal, store).streams.find("a")
    return 0 if stream is None else stream.visible


def test_a_file_cut_anywhere_keeps_what_was_whole(journal: Path, store: StoredStreams) -> None:
    ends = write_journal_file(journal, 1, RECORDS, padding=0)
    path = file_path(journal, 1)
    whole = path.read_bytes()
    for cut in range(ends[-1] + 1):
        path.write_bytes(whole[:cut])
        assert tail(journal, store) == sum(1 for end in ends[1:] if end <= cut)
        # The same, in a file whose blocks had been allocated.
        path.write_bytes(whole[:cut].ljust(ends[-1] + 100, b"\0"))
        assert tail(journal, store) == sum(1 for end in ends[1:] if end <= cut)


def test_a_flipped_bit_in_the_last_file_ends_the_log_before_it(journal: Path, store: StoredStreams) -> None:
    ends = write_journal_file(journal, 1, RECORDS)
    for position in range(HEADER_BYTES, ends[-1]):
        flip(file_path(journal, 1), position, position % 8)
        assert tail(journal, store) == sum(1 for end in ends[1:] if end <= position)
        flip(file_path(journal, 1), position, position % 8)


def test_damage_that_a_mark_proves_to_be_acknowledged(journal: Path, store: StoredStreams) -> None:
    ends = write_journal_file(journal, 1, RECORDS, marked=True)
    assert tail(journal, store) == 4
    last = ends[-2]
    for position in range(HEADER_BYTES, ends[-1]):
        flip(file_path(journal, 1), position, position % 8)
        if position < last - MARK_BYTES:
            with pytest.raises(JournalCorruptError, match="tailrace inspect journal"):
                tail(journal, store)
        else:
            assert tail(journal, store) == 3, "nothing says that the last batch was acknowledged"
        flip(file_path(journal, 1), position, position % 8)


def test_a_hole_in_what_was_acknowledged(journal: Path, store: StoredStreams) -> None:
    """A lost block reads as zeros, like the end; the marks behind it know better."""
    ends = write_journal_file(journal, 1, RECORDS, marked=True)
    path = file_path(journal, 1)
    data = bytearray(path.read_bytes())
    data[ends[1] - MARK_BYTES : ends[2]] = bytes(ends[2] - ends[1] + MARK_BYTES)
    path.write_bytes(data)
    with pytest.raises(JournalCorruptError, match="tailrace inspect journal"):
        tail(journal, store)


def test_a_batch_that_overtook_a_torn_one_is_dropped_with_it(journal: Path, store: StoredStreams) -> None:
    """Several syncs were under way; the later one reached the disk, the earlier one did not."""
    ends = write_journal_file(journal, 1, RECORDS[:2])
    path = file_path(journal, 1)
    seed = checksum_seed(ID + 1)
    payload = encode_record([append(1, 3, b"third")])
    record = frame_record(payload, seed) + payload
    torn = bytes(len(record) + MARK_BYTES)
    path.write_bytes(path.read_bytes()[: ends[-1]] + torn + encode_mark(ends[-1], seed) + record)
    assert tail(journal, store) == 2


def test_a_damaged_header_is_not_taken_for_an_empty_file(journal: Path, store: StoredStreams) -> None:
    """Everything in the file was acknowledged; it must not be thrown away as if it had never been used."""
    write_journal_file(journal, 1, RECORDS)
    before = sorted(journal.iterdir())
    for position in range(HEADER.size):
        flip(file_path(journal, 1), position, position % 8)
        with pytest.raises(JournalCorruptError, match="tailrace inspect journal"):
            tail(journal, store)
        with pytest.raises(JournalCorruptError):
            Journal(journal, 4096, 0, 0, descriptors=1)
        flip(file_path(journal, 1), position, position % 8)
    assert sorted(journal.iterdir()) == before


@pytest.mark.parametrize("zeroed", [HEADER_BYTES, HEADER_BYTES + 8, 512, 300_000])
def test_zeros_over_the_header_are_not_taken_for_an_empty_file(
    journal: Path, store: StoredStreams, zeroed: int
) -> None:
    """Whatever follows may be records that were acknowledged: they stay where they are."""
    records = [*RECORDS, [append(1, 5, b"x" * 400_000)]]
    write_journal_file(journal, 1, records)
    path = file_path(journal, 1)
    damaged = bytes(zeroed) + path.read_bytes()[zeroed:]
    path.write_bytes(damaged)
    with pytest.raises(JournalCorruptError, match=f"data at byte {zeroed}.*; .*'tailrace salvage'"):
        tail(journal, store)
    with pytest.raises(JournalCorruptError):
        Journal(journal, 4096, 0, 0, descriptors=1)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("content", [b"", bytes(10), bytes(5000), b"TRJRNL01" + bytes(5000)])
def test_a_file_that_was_never_begun_is_removed(journal: Path, store: StoredStreams, content: bytes) -> None:
    """Prepared, or with a header that was not written completely: there is nothing behind it."""
    write_journal_file(journal, 1, RECORDS)
    file_path(journal, 2).write_bytes(content)
    assert tail(journal, store) == 4
    Journal(journal, 4096, 1, 0, descriptors=1)
    assert [path.name for path in journal.iterdir()] == [file_path(journal, 1).name]


def test_damage_before_the_end_another_file_recorded(journal: Path, store: StoredStreams) -> None:
    ends = write_journal_file(journal, 1, RECORDS)
    write_journal_file(journal, 2, [[append(1, 5, b"fifth")]], previous=(1, ends[-1]))
    assert tail(journal, store) == 5
    for position in range(HEADER_BYTES, ends[-1]):
        flip(file_path(journal, 1), position, position % 8)
        with pytest.raises(JournalCorruptError, match="tailrace inspect journal"):
            tail(journal, store)
        flip(file_path(journal, 1), position, position % 8)
    flip(file_path(journal, 1), ends[-1] + 3)
    assert tail(journal, store) == 5, "what lies behind the recorded end does not matter"


def test_a_missing_file(journal: Path, store: StoredStreams) -> None:
    ends = write_journal_file(journal, 1, RECORDS)
    write_journal_file(journal, 2, [[append(1, 5, b"fifth")]], previous=(1, ends[-1]))
    file_path(journal, 1).unlink()
    with pytest.raises(JournalCorruptError, match=r"file 1 is missing.*tailrace inspect journal"):
        tail(journal, store)


def test_a_file_under_a_wrong_name(journal: Path, store: StoredStreams) -> None:
    write_journal_file(journal, 1, RECORDS)
    file_path(journal, 1).rename(file_path(journal, 2))
    with pytest.raises(JournalCorruptError, match="tailrace inspect journal"):
        tail(journal, store)


def test_what_failed_is_void_when_something_took_its_place(journal: Path, store: StoredStreams) -> None:
    ends = write_journal_file(journal, 1, RECORDS)
    write_journal_file(journal, 2, [[append(1, 3, b"in its place")]], previous=(1, ends[2]))
    assert tail(journal, store) == 3
    write_journal_file(
        journal, 3, [[append(1, 3, b"once more")], [append(1, 4, b"x")]], previous=(1, ends[2])
    )
    assert tail(journal, store) == 4


def test_a_record_that_makes_no_sense_is_refused_by_name(journal: Path, store: StoredStreams) -> None:
    for records in ([[append(7, 1, b"no such stream")]], [RECORDS[0], [append(1, 9, b"a gap")]]):
        write_journal_file(journal, 1, records)
        with pytest.raises(JournalCorruptError, match=r"0000000000000001.jnl.*tailrace inspect journal"):
            tail(journal, store)


def test_a_kind_of_record_from_the_future(journal: Path, store: StoredStreams) -> None:
    write_journal_file(journal, 1, [], raw=[b"\x63whatever it means"])
    with pytest.raises(JournalCorruptError, match=r"byte 64.*tailrace inspect journal"):
        tail(journal, store)


class Overtaken(StoredStreams):
    """The hot store of a server whose killed predecessor left a checkpointer that is still at work."""

    def __init__(self, data_dir: Path, seq: int, end: int) -> None:
        super().__init__(data_dir / "hot.db")
        self._late = (data_dir, seq, end)
        self.overtaken = False

    def stream_by_number(self, number: int) -> Stream | None:
        if not self.overtaken:
            self.overtaken = True
            checkpoint(*self._late)
        return super().stream_by_number(number)


def checkpoint(data_dir: Path, seq: int, end: int) -> None:
    writer = StoredStreams(data_dir / "hot.db", writer=True)
    checkpoint_file(data_dir, writer, seq, end, tombstone_ns=0)
    writer.db.close()


def test_a_checkpoint_in_the_middle_of_a_replay(tmp_path: Path, journal: Path) -> None:
    first = write_journal_file(journal, 1, RECORDS)
    second = write_journal_file(journal, 2, [[append(1, 5, b"fifth")]], previous=(1, first[-1]))
    checkpoint(tmp_path, 1, first[-1])
    store = Overtaken(tmp_path, 2, second[-1])
    assert tail(journal, store) == 5
    assert store.overtaken
    assert store.db.fact("journal_seq", 0) == 2
    assert tail(journal, store) == 5
    store.db.close()


def test_a_checkpoint_that_is_repeated_changes_nothing(tmp_path: Path, journal: Path) -> None:
    end = write_journal_file(journal, 1, RECORDS)[-1]
    checkpoint(tmp_path, 1, end)
    before = (tmp_path / "hot.db").read_bytes()
    checkpoint(tmp_path, 1, end)
    assert (tmp_path / "hot.db").read_bytes() == before


class Raced(StoredStreams):
    """A checkpointer whose killed predecessor wakes up in the middle of its work."""

    def __init__(self, data_dir: Path, seq: int, end: int) -> None:
        super().__init__(data_dir / "hot.db", writer=True)
        self._rival = (data_dir, seq, end)
        self.refused = False

    def stream_by_number(self, number: int) -> Stream | None:
        found = super().stream_by_number(number)
        data_dir, seq, end = self._rival
        rival = StoredStreams(data_dir / "hot.db", writer=True)
        rival.db.connection.set_busy_timeout(0)
        try:
            checkpoint_file(data_dir, rival, seq, end, tombstone_ns=0)
        except BusyError:
            self.refused = True
        finally:
            rival.db.close()
        return found


def test_two_checkpointers_never_fold_the_same_file(tmp_path: Path, journal: Path) -> None:
    first = write_journal_file(journal, 1, RECORDS)
    second = write_journal_file(journal, 2, [[append(1, 5, b"fifth")]], previous=(1, first[-1]))
    checkpoint(tmp_path, 1, first[-1])
    store = Raced(tmp_path, 2, second[-1])
    checkpoint_file(tmp_path, store, 2, second[-1], tombstone_ns=0)
    assert store.refused
    rows = list(store.db.blocks_from(1, 1))
    assert [(row.first, row.last, row.body) for row in rows] == [(1, 5, b"".join(LINES) + b"fifth")]
    store.db.close()
