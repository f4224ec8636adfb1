"""``tailrace verify``: check a data directory and its object store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import OK, REFUSED, RefusedError
from tailrace.cli.object_store import DEFAULT_STORE, StoreOptions, open_store, progress_bar
from tailrace.cli.session import flush_output, print_json, write_output

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.common.settings import Settings
    from tailrace.storage.verify import VerifyFinding, VerifyReport

_HELP: Final = """Read a data directory and its object store completely, and print errors.

In the data directory: that the journal can be replayed, that the pages of the hot store are sound, and that
entries follow each other without a gap. In the object store: the SHA-256 of every segment and page, the
checksums inside segments, their rows, payload bytes and times, that entries follow each other without a gap,
and that all of it matches the manifest. What was not checked is printed at the end.

Nothing is changed, and it may run beside a server. The exit code is 0 without findings, 1 if there are
findings, 2 if the store cannot be read.

For example:

    tailrace verify --data-dir ./tailrace-data

    tailrace verify --object-store s3://bucket/prefix --stream orders --json
"""

command = App(name="verify", help=_HELP, help_format="markdown")


@command.default
def verify(
    *,
    stream: Annotated[str, Parameter(help="Only this stream: its name, or its id of 32 hex digits.")] = "",
    bucket: StoreOptions = DEFAULT_STORE,
) -> int:
    return asyncio.run(_verify(stream, bucket))


async def _verify(stream: str, bucket: StoreOptions) -> int:
    import msgspec

    from tailrace.storage.verify import Verifier

    def report(finding: VerifyFinding) -> None:
        if bucket.json:
            print_json(msgspec.structs.asdict(finding))
        else:
            about = f"{finding.stream}  " if finding.stream else ""
            write_output(f"{about}{finding.key}: {finding.problem}\n".encode())
        flush_output()

    settings = bucket.settings()
    async with open_store(settings) as objects:
        verifier = Verifier(objects, report)
        seen = verifier.seen
        for path in _directories(settings, stream, seen.not_checked):
            await asyncio.to_thread(verifier.directory, path)
        async with progress_bar("verifying", lambda: (seen.bytes, seen.bytes_known or None, _counted(seen))):
            if stream:
                if not await verifier.named(stream):
                    raise RefusedError(f"stream {stream} not found in {objects.url}")
            else:
                await verifier.bucket()
    if bucket.json:
        print_json({"summary": msgspec.to_builtins(seen)})
    else:
        left_out = f"; not checked: {', '.join(seen.not_checked)}" if seen.not_checked else ""
        write_output(f"{_counted(seen)}{left_out}: {seen.findings or 'no'} findings\n".encode())
    flush_output()
    return REFUSED if seen.findings else OK


def _directories(settings: Settings, stream: str, not_checked: list[str]) -> list[Path]:
    """Directories with journals and hot stores; adds to `not_checked` why they are skipped."""
    from tailrace.cluster.layout import is_unused_directory, worker_paths

    local = "journal and hot store"
    root = settings.data_dir
    if stream:
        not_checked.append(f"{local} (only the history of {stream} in the object store was requested)")
        return []
    if not root.is_dir():
        not_checked.append(f"{local} (data directory {root} not found)")
        return []
    paths = [path for path in worker_paths(root) if not is_unused_directory(path)]
    if not paths:
        not_checked.append(f"{local} (no server has written to {root})")
    if (root / "watch.db").exists() or any((path / "watch.db").exists() for path in paths):
        not_checked.append("watch.db (it is derived from its streams)")
    return paths


def _counted(seen: VerifyReport) -> str:
    return (
        f"{seen.streams:,} streams, {seen.segments:,} segments, {seen.entries:,} entries, "
        f"{seen.index_files:,} index files, "
        f"{seen.bytes / 2**20:,.1f} MiB; "
        f"{seen.journal_records:,} journal records, {seen.hot_entries:,} entries in the hot store"
    )
