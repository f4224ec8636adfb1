"""The options of writing, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tailrace.spark.options import (
    CONNECTION_OPTIONS,
    Connection,
    OptionReader,
    parse_connection,
    raise_option_error,
)

APPEND_ROWS_DEFAULT = 1000
APPEND_BYTES_DEFAULT = 4 << 20
APPEND_BYTES_MAX = 9 << 20  # less than any server takes that was not set up with smaller limits
JSON_TYPE = "application/json"
STAGING_SCHEMES = ("s3", "gs", "az")
WRITE_OPTIONS = (
    *CONNECTION_OPTIONS,
    *("stream", "path", "delivery", "batchRows", "batchBytes", "stagingLocation"),
    *("createStream", "contentType", "producerId"),
    # What Spark itself puts among the options of a sink.
    *("checkpointLocation", "queryName", "outputMode", "asyncProgressTrackingEnabled"),
    *("asyncProgressTrackingCheckpointIntervalMs", "asyncProgressTrackingOverrideSinkSupportCheck"),
)
_PRODUCER_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows go, and how."""

    connection: Connection
    stream: str | None = None
    direct: bool = False
    rows_max: int = APPEND_ROWS_DEFAULT
    bytes_max: int = APPEND_BYTES_DEFAULT
    staging: str | None = None
    create: bool = True
    content_type: str = JSON_TYPE
    producer_id: str | None = None


def parse_write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    options = OptionReader(given)
    options.check_names(WRITE_OPTIONS)
    if options.flag("asyncProgressTrackingEnabled"):
        raise_option_error(
            "asyncProgressTrackingEnabled cannot be: batch numbers could then be used for other rows"
        )
    if options.get("stream") and options.get("path"):
        raise_option_error("stream and start(...) or save(...) name the target twice; use one of them")
    staging, at = options.get("stagingLocation"), options.get("checkpointLocation")
    if staging is None and at is not None:
        staging = at.rstrip("/") + "/tailrace-staging"
    delivery = options.one_of("delivery", ("staged", "direct")) or "staged"
    if delivery == "staged" and streaming and staging is None:
        raise_option_error(
            "delivery=staged needs a place: set checkpointLocation or stagingLocation on the query"
        )
    producer_id = options.get("producerId")
    if producer_id is not None and not _PRODUCER_ID_PATTERN.fullmatch(producer_id):
        raise_option_error("producerId is up to 128 letters, digits, dots, colons, dashes and underscores")
    bytes_max = options.count("batchBytes") or APPEND_BYTES_DEFAULT
    if bytes_max > APPEND_BYTES_MAX:
        raise_option_error(f"batchBytes is at most {APPEND_BYTES_MAX}")
    return WriteOptions(
        connection=parse_connection(options),
        stream=options.get("stream") or options.get("path"),
        direct=delivery == "direct",
        rows_max=options.count("batchRows") or APPEND_ROWS_DEFAULT,
        bytes_max=bytes_max,
        staging=None if staging is None else store_url(staging),
        create=options.flag("createStream", default=True),
        content_type=options.get("contentType") or JSON_TYPE,
        producer_id=producer_id,
    )


def store_url(location: str) -> str:
    """A location as the URL of a store: a path is a directory that all executors see."""
    if location.startswith("file:"):
        location = "/" + location.removeprefix("file:").lstrip("/")
    scheme, apart, _ = location.partition("://")
    if apart:
        if scheme not in STAGING_SCHEMES:
            raise_option_error(
                f"{location!r} cannot be staged to; set stagingLocation to a directory, s3://, gs:// or az://"
            )
        return location
    return Path(location).absolute().as_uri()
