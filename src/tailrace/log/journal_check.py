"""Read-only diagnosis of a journal: whether it can be replayed, and what its files hold.

`check_journal` reads every file that a start would replay; `inspect_journal` describes files and records for
people. Damage is reported instead of raised. Both are safe while a server is running: a file that is
checkpointed and deleted meanwhile is not reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.journal import (
    FRAME,
    FRAME_BYTES,
    HEADER_BYTES,
    MARK,
    JournalCorruptError,
    JournalHeader,
    JournalScan,
    checksum_seed,
    crc32c_extend,
    files_to_replay,
    last_mark,
    list_files,
    read_header,
)
from tailrace.log.records import (
    UNREADABLE_ERRORS,
    Append,
    Bind,
    Compacted,
    Create,
    Delete,
    Describe,
    Meta,
    Op,
    Published,
    Recorded,
    Sealed,
    Touch,
    Trim,
    decode_record,
)


class JournalProblem(NamedTuple):
    file: str
    problem: str


class JournalCheck(msgspec.Struct):
    """What was checked, and the problems found. `torn` is not damage: a crash leaves a torn record."""

    files: int = 0
    records: int = 0
    bytes: int = 0
    torn: str = ""  # the file whose last record was never finished
    problems: list[JournalProblem] = []


def check_journal(directory: Path, checkpoint_seq: int | None) -> JournalCheck:
    """`checkpoint_seq` is the last checkpointed file; None if the hot store cannot be read."""
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
    """The files that a start would replay; if these do not form a chain, all files with a header."""
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


_KINDS: dict[type, str] = {
    Create: "create",
    Delete: "delete",
    Touch: "touch",
    Meta: "meta",
    Bind: "bind",
    Sealed: "sealed",
    Trim: "trim",
    Recorded: "recorded",
    Describe: "describe",
    Published: "published",
    Compacted: "compacted",
}


def inspect_journal(data_dir: Path) -> Iterator[dict[str, object]]:
    """Each file, its records in order, and its end. Damaged places have a `problem`."""
    try:
        files = list_files(data_dir / "journal")
    except OSError as error:
        yield {"problem": f"the journal directory cannot be read: {error.strerror}"}
        return
    headers: dict[int, JournalHeader] = {}
    others: dict[int, dict[str, object]] = {}
    for seq, path in files:
        try:
            header = read_header(path)
        except (OSError, JournalCorruptError, TailraceError) as error:
            others[seq] = {"file": path.name, "problem": str(error)}
            continue
        if header is None:
            others[seq] = {"file": path.name, "state": "prepared, not used yet"}
        else:
            headers[seq] = header
    ends = _file_ends(headers)
    for seq, path in files:
        header = headers.get(seq)
        if header is None:
            yield others[seq]
        else:
            yield from _inspect_file(path, header, ends.get(seq), last=seq == max(headers))


def _file_ends(headers: dict[int, JournalHeader]) -> dict[int, int]:
    """The end of each file according to later files; 0 for files that a later one skips."""
    ends: dict[int, int] = {}
    for seq in sorted(headers):
        previous = headers[seq].previous_seq
        for skipped in range(previous + 1, seq):
            ends[skipped] = 0
        ends[previous] = headers[seq].previous_end
    return ends


def _inspect_file(
    path: Path, header: JournalHeader, end: int | None, *, last: bool
) -> Iterator[dict[str, object]]:
    described: dict[str, object] = {
        "file": path.name,
        "seq": header.seq,
        "id": f"{header.id:016x}",
        "previous_seq": header.previous_seq,
        "previous_end": header.previous_end,
        "created_ns": header.created_ns,
    }
    if header.seq != int(path.stem):
        described["problem"] = f"the header is of file {header.seq}"
    try:
        data = path.read_bytes()
    except OSError as error:
        yield {**described, "problem": f"cannot be read: {error.strerror}"}
        return
    described["bytes"] = len(data)
    if end is not None:
        described["end"] = end
    yield described
    if end == 0:
        yield {"file": path.name, "state": "void: a later file continues an older one"}
        return
    yield from _inspect_records(path.name, data, header, end, last=last)


def _inspect_records(
    name: str, data: bytes, header: JournalHeader, end: int | None, *, last: bool
) -> Iterator[dict[str, object]]:
    seed = checksum_seed(header.id)
    limit = len(data) if end is None else min(end, len(data))
    position = HEADER_BYTES
    count = 0
    damaged: int | None = None
    while position + FRAME_BYTES <= limit:
        length, crc = FRAME.unpack_from(data, position)
        if length == 0 and crc == 0:
            break
        start = position + FRAME_BYTES
        payload = data[start : start + length]
        if not 0 < length <= limit - start or crc32c_extend(seed, payload) != crc:
            damaged = position if damaged is None else damaged
            # If the length is intact the next record can still be read.
            if not _is_record(data, start + length, limit, seed):
                break
            yield {"file": name, "position": position, "bytes": length, "problem": "torn or damaged"}
        elif payload[0] == 0 and length == MARK.size:
            yield {"file": name, "position": position, "acknowledged": MARK.unpack(payload)[1]}
        else:
            count += 1
            yield {"file": name, "position": position, "bytes": length, "ops": _inspect_ops(payload)}
        position = start + length
    ended: dict[str, object] = {"file": name, "records": count, "ends_at": position}
    bad = position if damaged is None else damaged
    acknowledged = last_mark(data, bad, seed) if end is None else end
    if bad < acknowledged:
        ended["problem"] = f"damaged at byte {bad}, but records up to byte {acknowledged} were acknowledged"
    elif damaged is not None and last:
        ended["problem"] = f"torn at byte {bad}; recovery drops what follows the last good record"
    yield ended


def _is_record(data: bytes, position: int, limit: int, seed: int) -> bool:
    if position + FRAME_BYTES > limit:
        return False
    length, crc = FRAME.unpack_from(data, position)
    start = position + FRAME_BYTES
    return 0 < length <= limit - start and crc32c_extend(seed, data[start : start + length]) == crc


def _inspect_ops(payload: bytes) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    try:
        found.extend(_describe_op(op) for op in decode_record(payload))
    except UNREADABLE_ERRORS as error:
        found.append({"problem": f"cannot be decoded: {type(error).__name__}: {error}"})
    return found


def _describe_op(op: Op) -> dict[str, object]:
    if isinstance(op, Append):
        shown: dict[str, object] = {
            "kind": "append",
            "stream": op.stream,
            "first": op.first,
            "count": op.count,
            "bytes": len(op.body) if op.lengths is None else sum(op.lengths),
            "time_ns": op.time_ns,
        }
        if op.producer is not None:
            shown["producer"] = list(op.producer)
        for name, raw in (("key", op.key), ("seq", op.seq)):
            if raw is not None:
                shown[name] = raw.decode("utf-8", "replace")
        if op.keys is not None:
            shown["keys"] = [None if key is None else key.decode("utf-8", "replace") for key in op.keys]
        if op.binds is not None:
            shown["binds"] = op.binds
        if op.closes:
            shown["closes"] = True
        return shown
    fields = msgspec.structs.asdict(op)
    if isinstance(op, Meta | Describe):
        fields["value"] = None if op.value is None else f"{len(op.value)} bytes"
    elif isinstance(op, Sealed):
        fields["footers"] = [f"{len(footer)} bytes" for footer in op.footers]
    elif isinstance(op, Compacted):
        fields["footer"] = f"{len(op.footer)} bytes"
    described: dict[str, object] = {"kind": _KINDS[type(op)]}
    for name, value in fields.items():
        described[name] = msgspec.to_builtins(value)
    return described
