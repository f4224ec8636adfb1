"""Options of `format("tailrace")` for reads and writes, parsed and validated.

The parsed options are plain Structs, because they are pickled to executors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tailrace.common.timestamps import parse_rfc3339_ns

ENDPOINT_DEFAULT = "http://127.0.0.1:4437"
STREAMS_MAX = 10_000
FETCH_BYTES_DEFAULT = 4 << 20
# A shorter range is read from the server: two lookups in the store would cost more than they save.
SEALED_ENTRIES_MIN = 10_000
VALUE_FORMATS = ("string", "binary", "json")

CONNECTION_OPTIONS = (
    *("endpoint", "token", "tokenFile", "tls.caFile"),
    *("requestTimeout", "fetchBytes", "retries"),
)
READ_OPTIONS = (
    *CONNECTION_OPTIONS,
    *("stream", "streamPattern", "path", "startingOffsets", "endingOffsets"),
    *("startingTimestamp", "endingTimestamp", "maxOffsetsPerTrigger", "maxBytesPerTrigger"),
    *("minPartitions", "failOnDataLoss", "key", "valueFormat", "includeHeaders", "pushdown"),
    *("store", "sealedEntriesMin", "wholeStreams"),
)
Positions = str | dict[str, str]


class OptionError(ValueError):
    """An invalid option. The message names the option and what is expected."""


def raise_option_error(message: str) -> NoReturn:
    raise OptionError(message)


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """How to connect to the server. Its repr leaves out the token."""

    endpoint: str
    token: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    timeout_s: float = 30.0
    fetch_bytes: int = FETCH_BYTES_DEFAULT
    retries: int = 5

    def __repr__(self) -> str:
        return f"Connection({self.endpoint!r})"


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    connection: Connection
    streams: tuple[str, ...] = ()
    pattern: str | None = None
    starting: Positions | None = None
    ending: Positions | None = None
    starting_ns: int | None = None
    ending_ns: int | None = None
    rows_per_trigger: int | None = None
    bytes_per_trigger: int | None = None
    partitions_min: int = 0
    fail_on_data_loss: bool = True
    key: str | None = None
    value_format: str | None = None
    with_headers: bool = False
    pushdown: bool = False
    store: str | None = None
    sealed_entries_min: int = SEALED_ENTRIES_MIN
    whole_streams: bool = False


class OptionReader:
    """Case-insensitive access to options, as in Spark's own sources."""

    def __init__(self, options: Mapping[str, str]) -> None:
        # Spark's mapping ignores case; a plain dict made from it does not.
        self._values: dict[str, str] = {name.lower(): value for name, value in options.items()}

    def get(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        return None if value is None or not value.strip() else value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise_option_error(f"{name} must be true or false, got {value!r}")
        return value.lower() == "true"

    def count(self, name: str, minimum: int = 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdigit() or int(value) < minimum:
            raise_option_error(f"{name} must be an integer >= {minimum}, got {value!r}")
        return int(value)

    def seconds(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        try:
            seconds = float(value.removesuffix("s"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 86_400:
            raise_option_error(
                f"{name} must be a number of seconds, more than 0 and below 86400, got {value!r}"
            )
        return seconds

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        if value.lower() not in allowed:
            raise_option_error(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        return value.lower()

    def check_names(self, known: tuple[str, ...]) -> None:
        """Reject unknown options: a misspelt one would silently be ignored."""
        lower = {name.lower() for name in known}
        unknown = sorted(name for name in self._values if name not in lower)
        if unknown:
            raise_option_error(
                f"unknown option {', '.join(unknown)}; expected one of {', '.join(sorted(known))}"
            )


def parse_connection(options: OptionReader) -> Connection:
    endpoint = options.get("endpoint") or os.environ.get("TAILRACE_ENDPOINT") or ENDPOINT_DEFAULT
    if not endpoint.startswith(("http://", "https://")):
        raise_option_error(f"endpoint must be a URL such as {ENDPOINT_DEFAULT}, got {endpoint!r}")
    if options.get("token") and options.get("tokenFile"):
        raise_option_error("token and tokenFile are mutually exclusive")
    return Connection(
        endpoint=endpoint.rstrip("/"),
        token=options.get("token"),
        token_file=options.get("tokenFile"),
        ca_file=options.get("tls.caFile"),
        timeout_s=options.seconds("requestTimeout", 30.0),
        fetch_bytes=options.count("fetchBytes") or FETCH_BYTES_DEFAULT,
        retries=5 if (retries := options.count("retries", 0)) is None else retries,
    )


def parse_read_options(values: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    options = OptionReader(values)
    options.check_names(READ_OPTIONS)
    streams, pattern = _parse_streams(options)
    starting, starting_ns = _parse_bound(options, "starting", ("earliest", "latest"))
    ending, ending_ns = _parse_bound(options, "ending", ("latest",))
    if streaming and (ending is not None or ending_ns is not None):
        raise_option_error(
            "endingOffsets and endingTimestamp are for batch reads; a streaming query has no end"
        )
    rows, size = options.count("maxOffsetsPerTrigger"), options.count("maxBytesPerTrigger")
    if rows is not None and size is not None:
        raise_option_error("maxOffsetsPerTrigger and maxBytesPerTrigger are mutually exclusive")
    if not streaming and (rows or size):
        raise_option_error("maxOffsetsPerTrigger and maxBytesPerTrigger are for streaming queries")
    whole = options.flag("wholeStreams")
    if whole and options.count("minPartitions"):
        raise_option_error("wholeStreams and minPartitions are mutually exclusive")
    for positions in (starting, ending):
        if isinstance(positions, dict) and streams and (unknown := set(positions) - set(streams)):
            raise_option_error(f"offsets name {', '.join(sorted(unknown))}, which is not read")
    return ReadOptions(
        connection=parse_connection(options),
        streams=streams,
        pattern=pattern,
        starting=starting,
        ending=ending,
        starting_ns=starting_ns,
        ending_ns=ending_ns,
        rows_per_trigger=rows,
        bytes_per_trigger=size,
        partitions_min=options.count("minPartitions") or 0,
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        key=options.get("key"),
        value_format=options.one_of("valueFormat", VALUE_FORMATS),
        with_headers=options.flag("includeHeaders"),
        pushdown=options.flag("pushdown") and not streaming,
        store=options.get("store"),
        sealed_entries_min=(
            SEALED_ENTRIES_MIN if (entries := options.count("sealedEntriesMin", 0)) is None else entries
        ),
        whole_streams=whole,
    )


def _parse_streams(options: OptionReader) -> tuple[tuple[str, ...], str | None]:
    """The names of the streams, or a glob pattern."""
    names, path, pattern = options.get("stream"), options.get("path"), options.get("streamPattern")
    if names and path:
        raise_option_error("streams are named twice, by stream and by load(...); use one of them")
    names = names or path
    if (names is None) == (pattern is None):
        raise_option_error("exactly one of stream and streamPattern must be set")
    if pattern is not None:
        return (), pattern.strip()
    assert names is not None
    streams = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not streams:
        raise_option_error("stream is empty")
    if len(streams) > STREAMS_MAX:
        raise_option_error(f"stream must name at most {STREAMS_MAX} streams, got {len(streams)}")
    return streams, None


def _parse_bound(
    options: OptionReader, which: str, words: tuple[str, ...]
) -> tuple[Positions | None, int | None]:
    """One bound of the read: offsets, or Unix nanoseconds."""
    offsets, instant = options.get(f"{which}Offsets"), options.get(f"{which}Timestamp")
    if offsets is not None and instant is not None:
        raise_option_error(f"{which}Offsets and {which}Timestamp are mutually exclusive")
    if instant is not None:
        return None, _parse_instant_ns(f"{which}Timestamp", instant.strip())
    if offsets is None or offsets.strip().lower() in words:
        return None if offsets is None else offsets.strip().lower(), None
    try:
        positions: Any = msgspec.json.decode(offsets, type=dict[str, str])
    except msgspec.MsgspecError:
        raise_option_error(
            f'{which}Offsets must be {" or ".join(words)}, or JSON such as {{"events": "<offset>"}}'
        )
    return positions, None


def _parse_instant_ns(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text) * 1_000_000  # Unix milliseconds, as in Spark's other sources
    instant_ns = parse_rfc3339_ns(text)
    if instant_ns is None:
        raise_option_error(f"{name} must be RFC 3339 or Unix milliseconds, got {text!r}")
    return instant_ns


APPEND_ROWS_DEFAULT = 1000
APPEND_BYTES_DEFAULT = 4 << 20
APPEND_BYTES_MAX = 9 << 20  # below the default limit of the server
JSON_TYPE = "application/json"
STAGING_SCHEMES = ("s3", "gs", "az")
WRITE_OPTIONS = (
    *CONNECTION_OPTIONS,
    *("stream", "path", "delivery", "batchRows", "batchBytes", "stagingLocation"),
    *("createStream", "contentType", "producerId"),
    # Spark adds these to the options of a sink.
    *("checkpointLocation", "queryName", "outputMode", "asyncProgressTrackingEnabled"),
    *("asyncProgressTrackingCheckpointIntervalMs", "asyncProgressTrackingOverrideSinkSupportCheck"),
)
_PRODUCER_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    connection: Connection
    stream: str | None = None
    direct: bool = False
    rows_max: int = APPEND_ROWS_DEFAULT
    bytes_max: int = APPEND_BYTES_DEFAULT
    staging: str | None = None
    create: bool = True
    content_type: str = JSON_TYPE
    producer_id: str | None = None


def parse_write_options(values: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    options = OptionReader(values)
    options.check_names(WRITE_OPTIONS)
    if options.flag("asyncProgressTrackingEnabled"):
        raise_option_error(
            "asyncProgressTrackingEnabled is not supported: Spark could reuse a batch number for other rows"
        )
    if options.get("stream") and options.get("path"):
        raise_option_error("target is named twice, by stream and by start(...) or save(...); use one of them")
    staging, checkpoint = options.get("stagingLocation"), options.get("checkpointLocation")
    if staging is None and checkpoint is not None:
        staging = checkpoint.rstrip("/") + "/tailrace-staging"
    delivery = options.one_of("delivery", ("staged", "direct")) or "staged"
    if delivery == "staged" and streaming and staging is None:
        raise_option_error(
            "delivery=staged needs a staging location: set checkpointLocation or stagingLocation"
        )
    producer_id = options.get("producerId")
    if producer_id is not None and not _PRODUCER_ID_PATTERN.fullmatch(producer_id):
        raise_option_error("producerId must be 1 to 128 letters, digits, dots, colons, dashes or underscores")
    bytes_max = options.count("batchBytes") or APPEND_BYTES_DEFAULT
    if bytes_max > APPEND_BYTES_MAX:
        raise_option_error(f"batchBytes must be at most {APPEND_BYTES_MAX}")
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
    """The URL of a store for a location. A path is a directory that all executors share."""
    if location.startswith("file:"):
        location = "/" + location.removeprefix("file:").lstrip("/")
    scheme, separator, _ = location.partition("://")
    if separator:
        if scheme not in STAGING_SCHEMES:
            raise_option_error(
                f"staging to {location!r} is not supported; set stagingLocation to a directory, s3://, gs:// "
                "or az://"
            )
        return location
    return Path(location).absolute().as_uri()
