"""SQL over streams: streams and catalogue as temporary views, results written to a local file.

Every stream is a view under its name, registered when a statement names it. The catalogue views are
`tailrace.streams`, `tailrace.segments` and `tailrace.companions`. Views are recreated for each statement and
end at a fixed entry: a statement reads one snapshot of a stream, and the next statement a newer one.

Spark writes files where its executors run. To get a file on this machine, executors send their rows as Arrow
batches and the driver writes them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.protocol import offsets
from tailrace.spark.catalogue import StreamCatalogue
from tailrace.spark.columns import DEFAULT_COLUMNS
from tailrace.spark.history import read_stream_history
from tailrace.spark.options import OptionError, OptionReader, parse_connection, parse_read_options
from tailrace.spark.server_client import ServerClient
from tailrace.storage.manifests.pages import IndexFilePages, ListedIndexFiles
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.segments.parquet import BINARY, pa, pq

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

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
    for row in server.list_streams("", system=True):
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
    """The segments or index files in the manifests. Streams without uploaded segments are skipped."""
    for row in server.list_streams("", system=True):
        if int(row.uploaded_through or 0) < 0:
            continue
        location = server.locate(row.name)
        if location is None:
            continue
        store, planned = location
        segments, index_files = asyncio.run(_load_manifest(store, planned.stream_id))
        if name == "segments":
            for info in segments:
                yield (
                    row.name, info.epoch, info.first, info.last, info.rows, info.bytes, info.payload_bytes,
                    info.key, info.sha256,
                )  # fmt: skip
        else:
            for one in index_files:
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
        listed = ListedIndexFiles(head.index_file_pages, head.index_files)
        return (
            [info async for info in manifests.segments(head)],
            [index_file async for index_file in pages.walk(listed)],
        )
    finally:
        await objects.close()


RESULT_FILE = "part-00000.parquet"
_BATCH_COLUMN = "batch"


def write_local_parquet(found: DataFrame, directory: Path) -> None:
    """Write the rows to one Parquet file in a new directory, batch by batch."""
    directory.mkdir(parents=True)
    frame: Any = found  # the library is half typed
    schema = frame.limit(0).toArrow().schema
    packed = frame.mapInArrow(serialize_batches, f"{_BATCH_COLUMN} binary")
    with pq.ParquetWriter(directory / RESULT_FILE, schema, compression="zstd") as writer:
        for row in packed.toLocalIterator():
            with pa.ipc.open_stream(row[0]) as batches:
                for batch in batches:
                    writer.write_batch(batch.cast(schema))


def serialize_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """On executors: each batch as the bytes of an Arrow IPC stream."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        packed = pa.array([sink.getvalue().to_pybytes()], BINARY)
        yield pa.RecordBatch.from_arrays([packed], names=[_BATCH_COLUMN])


VIEWS_MAX = 64  # in one statement
_SPARK_TYPES = {"string": "string", "integer": "bigint", "number": "double", "boolean": "boolean"}
# Quoted text and comments are left unchanged; the name of a catalogue view is quoted, because it has a dot.
_SQL_TOKENS = re.compile(
    r"('(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|`[^`]*`|--[^\n]*|/\*.*?\*/)"
    rf"|\btailrace\.({'|'.join(CATALOGUE_VIEWS)})\b",
    re.DOTALL | re.IGNORECASE,
)


class AsOf(NamedTuple):
    """The end of all streams in a session: an entry or a time."""

    entry: int | None = None
    time: str | None = None


def parse_as_of(text: str | None) -> AsOf:
    if text is None:
        return AsOf()
    if parse_rfc3339_ns(text) is not None:
        return AsOf(time=text)
    try:
        return AsOf(entry=offsets.parse_offset(text)[1])
    except TailraceError:
        message = (
            f"as-of must be an offset or an RFC 3339 timestamp such as 2026-01-01T00:00:00Z, got {text!r}"
        )
        raise OptionError(message) from None


class SqlSession:
    """A session in which every stream is a view."""

    def __init__(self, spark: SparkSession, connection: dict[str, str], end: AsOf | None = None) -> None:
        self._spark = spark
        self._connection = connection
        self._end = end or AsOf()
        self._views: set[str] = set()
        # Unknown names are expected: `query` registers them.
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)

    def query(self, text: str) -> DataFrame:
        """The result of one statement, evaluated lazily."""
        self._drop_views()
        text = _SQL_TOKENS.sub(lambda found: found[1] or f"`tailrace.{found[2].lower()}`", text)
        for _ in range(VIEWS_MAX):
            try:
                return self._spark.sql(text)
            except AnalysisException as error:
                name = missing_view_name(error)
                if name is None or name in self._views or not self._register(name):
                    raise
        raise OptionError(f"statement names more than {VIEWS_MAX} streams")

    def _drop_views(self) -> None:
        for name in self._views:
            self._spark.catalog.dropTempView(name)
        self._views.clear()

    def _register(self, name: str) -> bool:
        """Register the view for a name; False if there is no such stream."""
        if name.startswith("tailrace.") and name.removeprefix("tailrace.") in CATALOGUE_VIEWS:
            frame = catalogue_frame(self._spark, self._connection, name.removeprefix("tailrace."))
        else:
            frame = self._stream_frame(name)
        if frame is None:
            return False
        frame.createOrReplaceTempView(f"`{name}`")
        self._views.add(name)
        return True

    def _stream_frame(self, name: str) -> DataFrame | None:
        try:
            options = parse_read_options({**self._connection, "stream": name}, streaming=False)
            catalogue = StreamCatalogue(options)
        except OptionError:
            return None
        state = catalogue.state(name)
        if state is None:
            return None
        to_entry = state.tail.entry if self._end.entry is None else min(self._end.entry, state.tail.entry)
        connection: Any = self._connection
        frame = read_stream_history(
            self._spark, name, to_entry=to_entry, to_time=self._end.time, **connection
        )
        if not state.json:
            return frame
        typed = _schema_columns(catalogue.versions(state).registry)
        return frame.withColumn("json", f.try_parse_json(f.col("value"))).select(
            *DEFAULT_COLUMNS, "json", *(column.alias(field) for field, column in typed.items())
        )


def missing_view_name(error: AnalysisException) -> str | None:
    """The unquoted name of the table that Spark did not find; None for another error."""
    if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
        return None
    parameters: Any = error.getMessageParameters() or {}
    relation: str = parameters.get("relationName", "")
    parts = re.findall(r"`((?:[^`]|``)*+)`", relation)
    return "/".join(part.replace("``", "`") for part in parts) or None


def _schema_columns(registry: bytes | None) -> dict[str, Column]:
    """The top-level properties of the current schema with a scalar type, as columns."""
    if registry is None:
        return {}
    document = msgspec.json.decode(registry, type=_SchemaRegistry)
    schema = document.schemas.get(str(document.currentVersion))
    if not isinstance(schema, dict):
        return {}
    try:
        properties = msgspec.convert(schema, _JsonSchema).properties
    except msgspec.ValidationError:
        return {}
    found: dict[str, Column] = {}
    taken = {*DEFAULT_COLUMNS, "json"}
    for name, shape in properties.items():
        kind = (
            _SPARK_TYPES.get(str(cast("dict[str, Any]", shape).get("type")))
            if isinstance(shape, dict)
            else None
        )
        if kind is not None and name.lower() not in taken and "'" not in name:
            taken.add(name.lower())
            found[name] = f.try_variant_get(f.col("json"), f"$['{name}']", kind)
    return found


class _SchemaRegistry(msgspec.Struct):
    currentVersion: int = 0  # noqa: N815 - as the server writes it
    schemas: dict[str, Any] = {}


class _JsonSchema(msgspec.Struct):
    properties: dict[str, Any] = {}
