"""``tailrace sql``: SQL over streams, with Spark."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Group, Parameter

from tailrace.cli.errors import RefusedError, UsageError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    print_json,
    require_server,
    write_output,
)
from tailrace.cli.spark_requirements import require_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tailrace.spark.sql import SqlSession

_HELP: Final = """Query streams in SQL. Every stream is a table with its name.

Without a query there is a prompt, which reuses the session: Spark takes some seconds to start. There a
statement ends with a semicolon.

For example:

    tailrace sql "select count(*) from orders"

    tailrace sql "select json:user.id::string as user, count(*) from `events/clicks` group by 1" --csv

    tailrace sql "select * from orders where entry > 1000" --out orders.parquet

Columns are stream, key, value, offset, entry, timestamp and epoch; on JSON streams also json, a VARIANT, and
the top-level properties of the schema. tailrace.streams, tailrace.segments and tailrace.companions list what
exists.
"""
_SPARK: Final = Group("Spark", sort_key=8)
_ROWS_SHOWN_MAX: Final = 1000
_CELL_CHARS_MAX: Final = 60

command = App(name="sql", help=_HELP, help_format="markdown")


@command.default
def sql(
    query: Annotated[str | None, Parameter(help="One statement; by default a prompt.")] = None,
    /,
    *,
    csv: Annotated[bool, Parameter(negative="", help="Print CSV with a header line.")] = False,
    out: Annotated[
        Path | None, Parameter(help="Write Parquet files to this new directory instead of printing.")
    ] = None,
    as_of: Annotated[
        str | None, Parameter(help="Read streams up to an offset, or an RFC 3339 timestamp.")
    ] = None,
    master: Annotated[
        str, Parameter(env_var="TAILRACE_PIPELINE_MASTER", group=_SPARK, help="Where Spark runs.")
    ] = "local[*]",
    session: Session = DEFAULT_SESSION,
) -> None:
    if sum((csv, session.json, out is not None)) > 1:
        raise UsageError("use only one of --json, --csv and --out")
    if query is None and out is not None:
        raise UsageError("--out requires a query")
    require_spark(master)
    from tailrace.spark.options import OptionError
    from tailrace.spark.sql import parse_as_of

    try:
        end = parse_as_of(as_of)
    except OptionError as error:
        raise UsageError(str(error)) from None
    require_server(session)
    print("starting Spark, a few seconds ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="tailrace-sql-") as directory:
        from tailrace.spark.session import is_local, normalize_master, open_session
        from tailrace.spark.sql import SqlSession

        spark = open_session(normalize_master(master), Path(directory))
        try:
            connection = {"endpoint": session.url} | ({"token": session.token} if session.token else {})
            shell = SqlSession(spark, connection, end)
            printing = "json" if session.json else "csv" if csv else "table"
            if query is None:
                _prompt(shell, printing)
            else:
                _answer(shell, query, printing, out, here=not is_local(master))
        finally:
            spark.stop()


def _answer(shell: SqlSession, query: str, printing: str, out: Path | None, *, here: bool = False) -> None:
    """Run one query. `here`: this process writes the files, as executors may be on other machines."""
    from pyspark.errors import PySparkException

    from tailrace.spark.options import OptionError

    try:
        found = shell.query(query.strip().rstrip(";"))
        if out is not None:
            if here:
                _write_here(found, out)
            else:
                found.write.mode("error").parquet(str(out.absolute()))
            print(f"wrote {out}", file=sys.stderr)
            return
        _print(found, printing)
    except PySparkException as error:
        raise RefusedError(_first_line(error)) from None
    except OptionError as error:
        raise RefusedError(str(error)) from None


def _write_here(found: DataFrame, out: Path) -> None:
    from tailrace.spark.sql import write_local_parquet

    try:
        write_local_parquet(_printable(found), out)
    except FileExistsError:
        raise RefusedError(f"{out} exists already") from None


def _first_line(error: Any) -> str:
    """The message without the Java stack trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _prompt(shell: SqlSession, printing: str) -> None:
    if sys.stdin.isatty():
        print("end a statement with ; and exit with Ctrl-D", file=sys.stderr)
    text = ""
    while True:
        try:
            line = _line("tailrace> " if not text else "      ..> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            text = ""
            continue
        if not text and line.strip().lower() in ("exit", "quit", "exit;", "quit;"):
            return
        text += line + "\n"
        if text.strip().endswith(";"):
            try:
                _answer(shell, text, printing, None)
            except RefusedError as error:
                print(error, file=sys.stderr)
            text = ""
        elif not text.strip():
            text = ""


def _line(sign: str) -> str:
    """Read a line, with a prompt on a terminal only."""
    if sys.stdin.isatty():
        return input(sign)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _print(found: DataFrame, printing: str) -> None:
    frame = _printable(found)
    names = frame.columns
    if printing == "table":
        _print_table(names, frame.limit(_ROWS_SHOWN_MAX + 1).collect())
    elif printing == "json":
        for row in frame.toLocalIterator():
            print_json(dict(zip(names, _cells(row), strict=True)))
    else:
        import csv
        import io

        for row in (names, *map(_cells, frame.toLocalIterator())):
            line = io.StringIO()
            csv.writer(line, lineterminator="\n").writerow(row)
            write_output(line.getvalue().encode())
    flush_output()


def _printable(found: DataFrame) -> DataFrame:
    """Convert variants to JSON, as they cannot be printed otherwise."""
    from pyspark.sql.functions import col, to_json
    from pyspark.sql.types import VariantType

    fields = found.schema.fields
    if not any(isinstance(field.dataType, VariantType) for field in fields):
        return found
    quoted = [f"`{field.name.replace('`', '``')}`" for field in fields]
    return found.select(
        *(
            to_json(col(name)).alias(field.name) if isinstance(field.dataType, VariantType) else col(name)
            for name, field in zip(quoted, fields, strict=True)
        )
    )


def _cells(row: Any) -> Iterator[Any]:
    from datetime import date, datetime
    from decimal import Decimal

    for value in row:
        match value:
            case bytes() | bytearray():
                yield bytes(value).decode(errors="replace")
            case datetime() | date():
                yield value.isoformat()
            case Decimal():
                yield str(value)
            case _:
                yield value.asDict(recursive=True) if hasattr(value, "asDict") else value


def _print_table(names: list[str], rows: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold", max_width=_CELL_CHARS_MAX)
    for row in rows[:_ROWS_SHOWN_MAX]:
        table.add_row(*("" if cell is None else str(cell) for cell in _cells(row)))
    console = Console(highlight=False, markup=False)
    console.print(table)
    more = " or more; --json and --csv print all" if len(rows) > _ROWS_SHOWN_MAX else ""
    count = min(len(rows), _ROWS_SHOWN_MAX)
    console.print(f"{count} row{'' if count == 1 else 's'}{more}")
