"""What the hot store holds, for people: read-only, and safe beside a running server."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import apsw

from tailrace.storage.hot_store.hot import Execute

INSPECTED_TABLES = (
    "streams", "tombstones", "producers", "blocks", "meta", "segments", "heads", "graves", "forks", "due",
    "trims", "documents",
)  # fmt: skip
SAMPLE_COUNT = 20

_COUNT = {table: f"SELECT count(*) FROM {table}" for table in INSPECTED_TABLES}  # noqa: S608
_SAMPLE = """
SELECT s.number, s.name, s.gone, s.deadline_ns, length(s.image),
    (SELECT count(*) FROM producers p WHERE p.number = s.number),
    count(b.first), min(b.first), max(b.last), coalesce(sum(length(b.body)), 0)
FROM (SELECT * FROM streams ORDER BY name LIMIT ?) s LEFT JOIN blocks b ON b.number = s.number
GROUP BY s.number ORDER BY s.name
"""
_SAMPLE_COLUMNS = (
    "number",
    "name",
    "gone",
    "deadline_ns",
    "image_bytes",
    "producers",
    "blocks",
    "first_entry",
    "last_entry",
    "payload_bytes",
)


def inspect_hot_store(data_dir: Path) -> dict[str, object]:
    """Facts, rows per table, sizes and the first streams by name; or the `problem` of reading them."""
    path = data_dir / "hot.db"
    described: dict[str, object] = {"file": str(path)}
    if not path.exists():
        return {**described, "problem": "there is no hot store yet; everything is in the journal"}
    try:
        for suffix, name in (("", "bytes"), ("-wal", "wal_bytes")):
            file = path.with_name(path.name + suffix)
            described[name] = file.stat().st_size if file.exists() else 0
        described.update(_read_summary(path))
    except (apsw.Error, OSError) as error:
        described["problem"] = f"cannot be read: {type(error).__name__}: {error}"
    return described


def _read_summary(path: Path) -> dict[str, object]:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        connection.set_busy_timeout(5_000)
        execute = cast("Execute", connection.execute)  # pyright: ignore[reportUnknownMemberType]
        execute("BEGIN")  # one view of everything, whatever is written meanwhile
        facts = {str(key): value for key, value in execute("SELECT key, value FROM facts ORDER BY key")}
        rows: dict[str, object] = {}
        present = {name for (name,) in execute("SELECT name FROM sqlite_schema WHERE type='table'")}
        for table, query in _COUNT.items():
            if table not in present:
                rows[table] = 0  # a store of an older version
                continue
            found = execute(query).fetchone()
            rows[table] = None if found is None else found[0]
        sample = [dict(zip(_SAMPLE_COLUMNS, row, strict=True)) for row in execute(_SAMPLE, (SAMPLE_COUNT,))]
        pages = {
            name: found[0]
            for name in ("page_count", "freelist_count", "page_size")
            if (found := execute(f"PRAGMA {name}").fetchone()) is not None
        }
        execute("COMMIT")
    finally:
        connection.close()
    return {"pages": pages, "facts": facts, "rows": rows, "streams": sample}
