"""docs/formats.md says what the code does: its example is decoded, its tables are compared."""

from __future__ import annotations

import re
from pathlib import Path

from tailrace.log import journal, records
from tailrace.log.records import Append
from tailrace.storage.data_directory import DIRECTORY_VERSION
from tailrace.storage.hot_store.database import HotDatabase

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")


def example() -> bytes:
    block = re.search(r"```hex\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return b"".join(bytes.fromhex(line[6:]) for line in block[1].splitlines())


def test_the_example_is_a_journal_file(tmp_path: Path) -> None:
    path = tmp_path / "0000000000000001.jnl"
    path.write_bytes(example())
    header = journal.read_header(path)
    assert header is not None
    assert header == journal.JournalHeader(1, 0x1122334455667788, 0, 0, 1_700_000_000_000_000_000)
    scan = journal.JournalScan(path, header)
    ((position, payload),) = list(scan)
    assert (position, scan.end, scan.torn) == (64, len(example()), False)
    (op,) = records.decode_record(payload)
    assert isinstance(op, Append)
    assert (op.stream, op.first, op.count, op.body, op.key) == (2, 1, 1, b"hi\n", b"k")
    assert op.encode() == payload
    assert journal.encode_header(header) == example()[:64]


def test_an_append_of_one_entry_is_written_like_any_other() -> None:
    for key in (None, b"", b"@(svc/bill)"):
        op = Append(7, 9, 1, b'{"a":1}', None, 1_767_225_600_000_000_000, key)
        assert records.pack_single_append(op.stream, op.first, op.time_ns, op.body, key) == op.encode()


def test_the_sizes_are_those_of_the_code() -> None:
    assert (journal.HEADER_BYTES, journal.HEADER.size, journal.FRAME_BYTES) == (64, 56, 8)
    assert records.APPEND_HEAD_BYTES == 34
    for text in (
        "bytes 0-55",
        "fixed head of 34 bytes",
        f"`{journal.MAGIC.decode()}`",
        f"directory: `{DIRECTORY_VERSION}`",
    ):
        assert text in PAGE


def test_every_kind_and_flag_is_there() -> None:
    kinds = {"create": records.CREATE, "delete": records.DELETE, "touch": records.TOUCH}
    kinds |= {"meta": records.META, "bind": records.BIND, "sealed": records.SEALED}
    kinds |= {"trim": records.TRIM, "recorded": records.RECORDED, "describe": records.DESCRIBE}
    flags = PAGE[PAGE.index("| flag | part |") : PAGE.index("In the body of a JSON stream")]
    for name, kind in kinds.items():
        assert re.search(rf"^\| {kind} \| {name} \|", PAGE, re.MULTILINE), name
    assert records.APPEND == 1
    assert sorted(int(flag) for flag in re.findall(r"^\| (\d+) \|", flags, re.MULTILINE)) == sorted(
        (
            records.CLOSES,
            records.HAS_PRODUCER,
            records.HAS_SEQ,
            records.HAS_KEY,
            records.BINDS,
            records.HAS_LENGTHS,
            records.HAS_KEYS,
        )
    )


def test_every_table_and_column_is_there(tmp_path: Path) -> None:
    store = HotDatabase(tmp_path / "hot.db")
    tables = [
        str(row[0]) for row in store.connection.execute("SELECT name FROM sqlite_schema WHERE type='table'")
    ]
    for table in tables:
        columns = [str(row[1]) for row in store.connection.execute(f"PRAGMA table_info({table})")]
        listed = ", ".join(f"`{column}`" for column in columns)
        assert f"| `{table}` | {listed} |" in PAGE
    store.close()
