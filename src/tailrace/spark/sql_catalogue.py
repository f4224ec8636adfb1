"""What there is, as views: `tailrace.streams`, `tailrace.segments`, `tailrace.companions`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tailrace.spark.options import OptionReader, parse_connection
from tailrace.spark.server_client import ServerClient
from tailrace.storage.manifests.pages import IndexFilePages, ListedIndexFiles
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import open_object_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tailrace.storage.segments.index_files import IndexFile
    from tailrace.storage.segments.model import SegmentInfo

CATALOGUE_VIEWS = {
    "streams": (
        "name string, content_type string, profile string, created_at string, closed boolean, epoch int, "
        "entries bigint, sealed_through bigint, bytes bigint"
    ),
    "segments": (
        "stream string, epoch int, first bigint, last bigint, rows bigint, bytes bigint, "
        "payload_bytes bigint, object string, sha256 string"
    ),
    "companions": (
        "stream string, family string, first bigint, last bigint, rows bigint, bytes bigint, level int, "
        "plan_hash string, object string"
    ),
}


def catalogue_frame(spark: SparkSession, connection: dict[str, str], name: str) -> DataFrame:
    options = OptionReader(connection)
    server = ServerClient(parse_connection(options))
    try:
        rows = list(_stream_rows(server)) if name == "streams" else list(_object_rows(server, name))
    finally:
        server.close()
    make: Any = getattr(spark, "createDataFrame")  # noqa: B009 - the library is half typed
    return make(rows, CATALOGUE_VIEWS[name])


def _stream_rows(server: ServerClient) -> Iterator[tuple[Any, ...]]:
    for row in server.listed("", system=True):
        yield (
            row.name,
            row.content_type,
            row.profile,
            row.created_at,
            row.closed,
            row.epoch,
            int(row.next_offset or 0),
            int(row.sealed_through or 0),
            int(row.total_size_bytes or 0),
        )


def _object_rows(server: ServerClient, name: str) -> Iterator[tuple[Any, ...]]:
    """What the manifests list. A stream of which nothing is sealed is not looked at."""
    for row in server.listed("", system=True):
        if int(row.uploaded_through or 0) < 0:
            continue
        place = server.place(row.name)
        if place is None:
            continue
        store, planned = place
        segments, companions = asyncio.run(_load_manifest(store, planned.stream_id))
        if name == "segments":
            for info in segments:
                yield (
                    row.name, info.epoch, info.first, info.last, info.rows, info.bytes, info.payload_bytes,
                    info.key, info.sha256,
                )  # fmt: skip
        else:
            for one in companions:
                yield (
                    row.name, one.family, one.first, one.last, one.rows, one.bytes, one.level, one.plan_hash,
                    one.object,
                )  # fmt: skip


async def _load_manifest(store: str, stream_id: str) -> tuple[list[SegmentInfo], list[IndexFile]]:
    objects = open_object_store(store)
    try:
        manifests = ManifestStore(objects, 0)
        stored = await manifests.load(stream_id)
        if stored is None or stored.head.deleted is not None:
            return [], []
        head = stored.head
        pages = IndexFilePages(objects, stream_id)
        listed = ListedIndexFiles(head.companion_pages, head.companions)
        return (
            [info async for info in manifests.segments(head)],
            [companion async for companion in pages.walk(listed)],
        )
    finally:
        await objects.close()
