"""``tailrace inspect``: what the files of a data directory hold, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.failures import RefusedError
from tailrace.cli.session import flush, put, put_json

_HELP: Final = """Print what the files of a data directory hold. Nothing is changed, and no server is needed.

For example:

    tailrace inspect journal --data-dir ./tailrace-data

    tailrace inspect hot --json
"""

DataDir = Annotated[Path, Parameter(env_var="TAILRACE_DATA_DIR", help="The data directory.")]
AsJson = Annotated[bool, Parameter(negative="", help="Print JSON, one object per line.")]
_HERE: Final = Path("./tailrace-data")

command = App(name="inspect", help=_HELP, help_format="markdown")


@command.command
def journal(*, data_dir: DataDir = _HERE, json: AsJson = False) -> None:
    """Print every record of the journal, in order, and where it ends."""
    from tailrace.log.inspect import inspect_journal

    for record in inspect_journal(_existing(data_dir)):
        if json:
            put_json(record)
        else:
            put("  ".join(f"{name}={_shown(value)}" for name, value in record.items()).encode() + b"\n")
    flush()


@command.command
def hot(*, data_dir: DataDir = _HERE, json: AsJson = False) -> None:
    """Print what the hot store holds: its position in the journal, its tables and their sizes."""
    from tailrace.store.inspect import inspect_hot

    described = inspect_hot(_existing(data_dir))
    if json:
        put_json(described)
    else:
        width = max((len(name) for name in described), default=0)
        for name, value in described.items():
            put(f"{name:<{width}}  {_shown(value)}\n".encode())
    flush()


def _existing(data_dir: Path) -> Path:
    if not data_dir.is_dir():
        raise RefusedError(f"there is no data directory {data_dir}")
    return data_dir


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        import orjson

        return orjson.dumps(value, default=str).decode()
    return str(value)
