"""``tailrace gc``: delete unreferenced objects."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.object_store import DEFAULT_STORE, StoreOptions, open_store, progress_bar
from tailrace.cli.options import parse_span_ms
from tailrace.cli.session import flush_output, print_json, write_output

if TYPE_CHECKING:
    from tailrace.storage.sweep import Orphan, SweepReport

_HELP: Final = """Delete objects that no manifest references, or list them with `--dry-run`.

These are leftovers of uploads and deletions interrupted by a crash, and replaced pages and producer states.
It may run beside a server and be stopped at any time: an object is deleted only if it is older than the grace
time and no manifest can ever reference it again. Segments after the last recorded entry are never deleted,
because their upload may be in progress.

A server does the same by itself, every `sweep_interval_ms`, and also forgets streams that were deleted more
than `tombstone_ms` ago. Without a server `--offline` does this; it also deletes folders without a manifest,
which look like a stream that is being created.

For example:

    tailrace gc --dry-run

    tailrace gc --object-store s3://bucket/prefix --grace 1d
"""

command = App(name="gc", help=_HELP, help_format="markdown")


@command.default
def gc(
    *,
    dry_run: Annotated[bool, Parameter(negative="", help="Only list the objects.")] = False,
    grace: Annotated[
        str, Parameter(help="Do not delete objects younger than this, such as 30m, 1h or 2d.")
    ] = "1h",
    offline: Annotated[
        bool,
        Parameter(
            negative="", help="No server uses the bucket: also delete objects that one may be creating."
        ),
    ] = False,
    bucket: StoreOptions = DEFAULT_STORE,
) -> None:
    asyncio.run(_sweep(bucket, grace, dry_run=dry_run, offline=offline))


async def _sweep(bucket: StoreOptions, grace: str, *, dry_run: bool, offline: bool) -> None:
    import msgspec

    from tailrace.storage.sweep import Sweeper

    settings = bucket.settings()
    grace_ms = parse_span_ms(grace, "--grace")

    def report(orphan: Orphan) -> None:
        if bucket.json:
            print_json(msgspec.structs.asdict(orphan))
        elif dry_run:
            write_output(f"{orphan.key}  {orphan.bytes:,} bytes: {orphan.reason}\n".encode())

    async with open_store(settings) as objects:
        sweeper = Sweeper(
            objects,
            report,
            grace_ns=grace_ms * 1_000_000,
            tombstone_ns=settings.limits.tombstone_ms * 1_000_000,
            segment_grace_ns=settings.limits.gc_segment_grace * 1_000_000,
            orphan_age_ns=settings.limits.gc_orphan_age * 1_000_000,
            dry_run=dry_run,
            offline=offline,
        )
        async with progress_bar("sweeping", lambda: (0, None, _counted(sweeper.seen, dry_run))):
            seen = await sweeper.bucket()
    if bucket.json:
        print_json({"summary": msgspec.structs.asdict(seen)})
    else:
        write_output(f"{_counted(seen, dry_run)}\n".encode())
        if seen.unclaimed and not offline:
            write_output(
                f"{seen.unclaimed:,} objects have no manifest; delete them with --offline\n".encode()
            )
        if seen.unreadable:
            write_output(
                f"{seen.unreadable:,} streams have a damaged manifest; see: tailrace verify\n".encode()
            )
    flush_output()


def _counted(seen: SweepReport, dry_run: bool) -> str:
    verb = "would delete" if dry_run else "deleted"
    return (
        f"checked {seen.objects:,} objects of {seen.streams:,} streams, "
        f"{verb} {seen.orphans:,} ({seen.orphan_bytes / 2**20:,.1f} MiB)"
    )
