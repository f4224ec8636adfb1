"""Whether a journal could be replayed: every file that a start would read, without changing anything.

It may run beside a server. A file that is retired meanwhile is not missed: the caller asks again with what
the hot store has by then.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.journal import (
    JournalCorruptError,
    JournalHeader,
    JournalScan,
    files_to_replay,
    list_files,
    read_header,
)
from tailrace.log.records import UNREADABLE_ERRORS, decode_record


class JournalProblem(NamedTuple):
    file: str
    problem: str


class JournalCheck(msgspec.Struct):
    """What was looked at, and what is wrong with it. `torn` is no damage: a crash left it behind."""

    files: int = 0
    records: int = 0
    bytes: int = 0
    torn: str = ""  # the file whose last record was never finished
    problems: list[JournalProblem] = []


def check_journal(directory: Path, checkpoint_seq: int | None) -> JournalCheck:
    """`checkpoint_seq` is the last file that the hot store has; None if the hot store cannot say."""
    found = JournalCheck()
    try:
        files = readable_files(directory, checkpoint_seq, found.problems)
    except OSError as error:
        found.problems.append(JournalProblem("journal", f"cannot be read: {error.strerror}"))
        return found
    for path, header, end in files:
        try:
            _check_file(found, path, header, end)
        except FileNotFoundError:
            continue  # checkpointed and deleted meanwhile
        except JournalCorruptError as error:
            _add_problem(found.problems, path.name, str(error))
        except OSError as error:
            _add_problem(found.problems, path.name, f"cannot be read: {error.strerror}")
    return found


def readable_files(
    directory: Path, checkpoint_seq: int | None, problems: list[JournalProblem]
) -> list[tuple[Path, JournalHeader, int | None]]:
    """The files that a start would replay, or where these do not form a chain, all that have a header."""
    if checkpoint_seq is None:
        checkpoint_seq = _first_previous(directory)
    try:
        return files_to_replay(directory, checkpoint_seq)
    except (JournalCorruptError, TailraceError) as error:
        text = str(error)
        _add_problem(
            problems, text.partition(":")[0] if text.partition(":")[0].endswith(".jnl") else "journal", text
        )
    headers: dict[int, tuple[Path, JournalHeader]] = {}
    for seq, path in list_files(directory):
        try:
            header = read_header(path)
        except (OSError, JournalCorruptError, TailraceError) as error:
            _add_problem(problems, path.name, str(error))
            continue
        if header is not None and header.seq == seq > checkpoint_seq:
            headers[seq] = (path, header)
    ends = {header.previous_seq: header.previous_end for _, header in headers.values()}
    voided = {
        seq for later, (_, header) in headers.items() for seq in headers if header.previous_seq < seq < later
    }
    return [(*found, ends.get(seq)) for seq, found in headers.items() if seq not in voided]


def _first_previous(directory: Path) -> int:
    for _, path in list_files(directory):
        try:
            header = read_header(path)
        except (OSError, JournalCorruptError, TailraceError):
            continue
        if header is not None:
            return header.previous_seq
    return 0


def _check_file(found: JournalCheck, path: Path, header: JournalHeader, end: int | None) -> None:
    found.files += 1
    scan = JournalScan(path, header, end)
    for position, payload in scan:
        found.records += 1
        found.bytes += len(payload)
        try:
            for _ in decode_record(payload):
                pass
        except UNREADABLE_ERRORS as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            _add_problem(found.problems, path.name, f"the record at byte {position} cannot be decoded: {why}")
    if scan.torn:
        found.torn = path.name


def _add_problem(problems: list[JournalProblem], file: str, text: str) -> None:
    problem = JournalProblem(file, text.removeprefix(f"{file}: "))
    if problem not in problems:
        problems.append(problem)
