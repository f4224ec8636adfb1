"""``tailrace salvage``: copy the readable data of a damaged data directory into a new one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import OK, REFUSED, RefusedError
from tailrace.cli.object_store import progress_bar
from tailrace.cli.session import flush_output, print_json, write_output

if TYPE_CHECKING:
    from tailrace.cluster.layout import Layout
    from tailrace.storage.salvage import SalvageReport

_HELP: Final = """Copy everything that can be read out of a damaged data directory into a new one.

OLD is only read. NEW must not exist, or be empty. Records of the journal and rows of the hot store that
cannot be read are left out, and everything else is copied: the other entries, keys, settings of streams, the
objects if they are in the data directory, and the identity of the server. Start a server on NEW with the same
settings, and never again one on OLD: both would be the same server.

Entries after lost ones get new numbers without a gap, and requests with old offsets after the loss get 410.
History in a bucket does not move. Entries whose stream has lost its name are in `salvaged/<number>`.

The report says what was copied and, for each stream, how many entries are missing and why. The hot store has
no page checksums: a changed value within a page cannot be detected. The exit
code is 0 if everything was copied and 1 if something is missing, or if the copy was refused.

For example:

    tailrace salvage /var/lib/tailrace /mnt/new/tailrace

    tailrace serve --data-dir /mnt/new/tailrace
"""

command = App(name="salvage", help=_HELP, help_format="markdown")


@command.default
def salvage(
    old: Annotated[Path, Parameter(help="The damaged data directory. No server may use it.")],
    new: Annotated[Path, Parameter(help="The directory to create.")],
    /,
    *,
    json: Annotated[bool, Parameter(negative="", help="Print JSON, one object per line.")] = False,
) -> int:
    return asyncio.run(_salvage(old.absolute(), new.absolute(), as_json=json))


async def _salvage(old: Path, new: Path, *, as_json: bool) -> int:
    from tailrace.storage.salvage import SalvageReport
    from tailrace.storage.salvage import salvage as copy

    _check(old, new)
    report = SalvageReport()
    layout = _layout(old, report)
    partial = new.with_name(f"{new.name}.partial")
    if partial.exists():
        raise RefusedError(f"{partial} is left over from an earlier attempt; delete it first")
    workers = [(layout.path(old, index), layout.path(partial, index)) for index in range(layout.workers)]
    async with progress_bar("copying", lambda: (report.bytes, None, _counted(report))):
        await asyncio.to_thread(copy, old, partial, workers, report)
    _finish(partial, new, layout)
    _put(report, as_json=as_json)
    return OK if report.complete else REFUSED


def _check(old: Path, new: Path) -> None:
    import fcntl

    if not old.is_dir():
        raise RefusedError(f"data directory {old} not found")
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise RefusedError(f"{new} exists and is not empty; use a new directory")
    if new == old or old in new.parents:
        raise RefusedError(f"{new} is inside {old}; use a directory outside of it")
    if (old / "lock").is_file():
        with (old / "lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RefusedError(f"a server is running on {old}; stop it first") from None


def _layout(old: Path, report: SalvageReport) -> Layout:
    """The layout; from the directories of workers if workers.json cannot be read."""
    from tailrace.cluster.layout import WORKERS_DIRECTORY, Layout, read_layout
    from tailrace.common.errors import TailraceError

    try:
        return read_layout(old)
    except TailraceError as error:
        report.problems.append(error.message)
    generations = [int(path.name) for path in (old / WORKERS_DIRECTORY).glob("*") if path.name.isdigit()]
    if not generations:
        return Layout()
    found = (old / WORKERS_DIRECTORY / str(max(generations))).glob("*")
    numbers = [int(path.name) for path in found if path.name.isdigit()]
    return Layout(workers=max(numbers, default=0) + 1, generation=max(generations))


def _finish(partial: Path, new: Path, layout: Layout) -> None:
    """Rename the copy when all of it is durable."""
    from tailrace.cluster.layout import write_layout
    from tailrace.common.private_files import sync_directory

    if layout.generation:
        write_layout(partial, layout)
    if new.exists():
        new.rmdir()
    partial.rename(new)
    sync_directory(new.parent)


def _put(report: SalvageReport, *, as_json: bool) -> None:
    import msgspec

    if as_json:
        for loss in report.losses.values():
            print_json(msgspec.structs.asdict(loss))
        summary = msgspec.structs.asdict(report)
        del summary["losses"]
        print_json({"summary": summary | {"streams_damaged": len(report.losses)}})
        flush_output()
        return
    for loss in report.losses.values():
        reasons = ", ".join(f"{count:,}: {reason}" for reason, count in loss.reasons.items())
        write_output(f"{loss.stream}: {loss.entries:,} entries are missing ({reasons})\n".encode())
    for problem in report.problems:
        write_output(f"{problem}\n".encode())
    missing = "nothing is missing"
    if not report.complete:
        missing = f"{report.entries_missing:,} entries of {len(report.losses):,} streams are missing"
    write_output(f"{_counted(report)}: {missing}\n".encode())
    flush_output()


def _counted(report: SalvageReport) -> str:
    return (
        f"{report.streams:,} streams, {report.entries:,} entries in the hot store, "
        f"{report.journal_records:,} journal records, {report.files:,} files, "
        f"{report.bytes / 2**20:,.1f} MiB"
    )
