"""``tailrace verify``: is everything in the object store as it was recorded?"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.buckets import DEFAULT, Bucket, opened, progress
from tailrace.cli.failures import OK, REFUSED, RefusedError
from tailrace.cli.session import flush, put, put_json

if TYPE_CHECKING:
    from tailrace.tier.verify import Finding, Verified

_HELP: Final = """Read everything again that the manifests of an object store name, and print what is wrong.

Checks the SHA-256 of every segment and page, the checksums inside segments, their rows, payload bytes and
times, that entries follow each other without a gap, and that all of it is what the manifest counts. Nothing
is changed, and it may run beside a server. The exit code is 0 if all is well, 1 if there are findings, 2 if
the store cannot be read.

For example:

    tailrace verify --data-dir ./tailrace-data

    tailrace verify --object-store s3://bucket/prefix --stream orders --json
"""

command = App(name="verify", help=_HELP, help_format="markdown")


@command.default
def verify(
    *,
    stream: Annotated[str, Parameter(help="Only this stream: its name, or its id of 32 hex digits.")] = "",
    bucket: Bucket = DEFAULT,
) -> int:
    return asyncio.run(_verify(stream, bucket))


async def _verify(stream: str, bucket: Bucket) -> int:
    import msgspec

    from tailrace.tier.verify import Verifier

    def report(finding: Finding) -> None:
        if bucket.json:
            put_json(msgspec.structs.asdict(finding))
        else:
            put(f"{finding.stream}  {finding.key}: {finding.problem}\n".encode())
        flush()

    async with opened(bucket.settings()) as objects:
        verifier = Verifier(objects, report)
        seen = verifier.seen
        async with progress("verifying", lambda: (seen.bytes, seen.bytes_known or None, _counted(seen))):
            if stream:
                if not await verifier.named(stream):
                    raise RefusedError(f"there is no stream {stream} in {objects.url}")
            else:
                await verifier.bucket()
    if bucket.json:
        put_json({"summary": msgspec.structs.asdict(seen)})
    else:
        put(f"{_counted(seen)}: {seen.findings or 'no'} findings\n".encode())
    flush()
    return REFUSED if seen.findings else OK


def _counted(seen: Verified) -> str:
    return (
        f"{seen.streams:,} streams, {seen.segments:,} segments, {seen.entries:,} entries, "
        f"{seen.companions:,} companions, "
        f"{seen.bytes / 2**20:,.1f} MiB"
    )
