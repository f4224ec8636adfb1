"""SQL over streams: a session in which every stream is a view under its name, registered when first named.

Views are made anew for each statement, and each has a fixed end: within a statement a stream has one content,
and the next statement sees what came meanwhile.
"""

from __future__ import annotations

import logging
import re
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
from tailrace.spark.options import OptionError, parse_read_options
from tailrace.spark.sql_catalogue import CATALOGUE_VIEWS, catalogue_frame

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

VIEWS_MAX = 64  # in one statement
_SPARK_TYPES = {"string": "string", "integer": "bigint", "number": "double", "boolean": "boolean"}
# What is quoted or a comment is left alone; a catalogue view gets the quotes that its dot needs.
_SQL_TOKENS = re.compile(
    r"('(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|`[^`]*`|--[^\n]*|/\*.*?\*/)"
    rf"|\btailrace\.({'|'.join(CATALOGUE_VIEWS)})\b",
    re.DOTALL | re.IGNORECASE,
)


class AsOf(NamedTuple):
    """Where streams end: at an entry, or at a time."""

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
        message = f"{text!r} is neither an offset nor an instant such as 2026-01-01T00:00:00Z"
        raise OptionError(message) from None


class SqlSession:
    """One session of SQL."""

    def __init__(self, spark: SparkSession, connection: dict[str, str], end: AsOf | None = None) -> None:
        self._spark = spark
        self._connection = connection
        self._end = end or AsOf()
        self._views: set[str] = set()
        # A name that is not known yet is no error here.
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)

    def query(self, text: str) -> DataFrame:
        """The result of one statement, not yet computed."""
        self._forget()
        text = _SQL_TOKENS.sub(lambda found: found[1] or f"`tailrace.{found[2].lower()}`", text)
        for _ in range(VIEWS_MAX):
            try:
                return self._spark.sql(text)
            except AnalysisException as error:
                name = missing_view_name(error)
                if name is None or name in self._views or not self._register(name):
                    raise
        raise OptionError(f"a statement may name {VIEWS_MAX} streams")

    def _forget(self) -> None:
        for name in self._views:
            self._spark.catalog.dropTempView(name)
        self._views.clear()

    def _register(self, name: str) -> bool:
        """Makes the view that a statement needs; False if there is no such stream."""
        if name.startswith("tailrace.") and name.removeprefix("tailrace.") in CATALOGUE_VIEWS:
            frame = catalogue_frame(self._spark, self._connection, name.removeprefix("tailrace."))
        else:
            frame = self._stream(name)
        if frame is None:
            return False
        frame.createOrReplaceTempView(f"`{name}`")
        self._views.add(name)
        return True

    def _stream(self, name: str) -> DataFrame | None:
        given = {**self._connection, "stream": name}
        try:
            catalogue = StreamCatalogue(parse_read_options(given, streaming=False))
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
    """The name that Spark did not find, without the quotes; None if that was not the matter."""
    if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
        return None
    parameters: Any = error.getMessageParameters() or {}
    relation: str = parameters.get("relationName", "")
    parts = re.findall(r"`((?:[^`]|``)*+)`", relation)
    return "/".join(part.replace("``", "`") for part in parts) or None


def _schema_columns(registry: bytes | None) -> dict[str, Column]:
    """The top-level properties of the current schema as columns, where their type is a plain one."""
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
