"""Options of `format("tailrace")` for reads and writes, parsed and validated.

The options of `format("tailrace")`, checked. Plain values: they travel to executors inside a pickle.

The options of writing, checked.
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
# A shorter range is read from the server: two look-ups in the store would cost more than they save.
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
    """An option that cannot be. The message names it and says what would do."""


def raise_option_error(message: str) -> NoReturn:
    raise OptionError(message)


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is reached. Never printed: it may hold a token."""

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
    """What is to be read."""

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
    """Looks options up without regard to case, which is what Spark's own sources do."""

    def __init__(self, given: Mapping[str, str]) -> None:
        # The object that Spark hands over does this by itself; a plain dictionary made of it does not.
        self._given: dict[str, str] = {name.lower(): value for name, value in given.items()}

    def get(self, name: str) -> str | None:
        value = self._given.get(name.lower())
        return None if value is None or not value.strip() else value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise_option_error(f"{name} is true or false, not {value!r}")
        return value.lower() == "true"

    def count(self, name: str, least: int = 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise_option_error(f"{name} is a whole number from {least} on, not {value!r}")
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
            raise_option_error(f"{name} is a number of seconds, not {value!r}")
        return seconds

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        if value.lower() not in allowed:
            raise_option_error(f"{name} is one of {', '.join(allowed)}, not {value!r}")
        return value.lower()

    def check_names(self, known: tuple[str, ...]) -> None:
        """A misspelt option would silently read something else than what was meant."""
        lower = {name.lower() for name in known}
        strange = sorted(name for name in self._given if name not in lower)
        if strange:
            raise_option_error(f"unknown option {', '.join(strange)}; there are {', '.join(sorted(known))}")


def parse_connection(options: OptionReader) -> Connection:
    endpoint = options.get("endpoint") or os.environ.get("TAILRACE_ENDPOINT") or ENDPOINT_DEFAULT
    if not endpoint.startswith(("http://", "https://")):
        raise_option_error(f"endpoint is a URL such as {ENDPOINT_DEFAULT}, not {endpoint!r}")
    if options.get("token") and options.get("tokenFile"):
        raise_option_error("token and tokenFile exclude each other")
    return Connection(
        endpoint=endpoint.rstrip("/"),
        token=options.get("token"),
        token_file=options.get("tokenFile"),
        ca_file=options.get("tls.caFile"),
        timeout_s=options.seconds("requestTimeout", 30.0),
        fetch_bytes=options.count("fetchBytes") or FETCH_BYTES_DEFAULT,
        retries=5 if (retries := options.count("retries", 0)) is None else retries,
    )


def parse_read_options(given: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    options = OptionReader(given)
    options.check_names(READ_OPTIONS)
    streams, pattern = _parse_streams(options)
    starting, starting_ns = _parse_bound(options, "starting", ("earliest", "latest"))
    ending, ending_ns = _parse_bound(options, "ending", ("latest",))
    if streaming and (ending is not None or ending_ns is not None):
        raise_option_error(
            "a streaming query has no end; endingOffsets and endingTimestamp are for batch reads"
        )
    rows, size = options.count("maxOffsetsPerTrigger"), options.count("maxBytesPerTrigger")
    if rows is not None and size is not None:
        raise_option_error("maxOffsetsPerTrigger and maxBytesPerTrigger exclude each other")
    if not streaming and (rows or size):
        raise_option_error("maxOffsetsPerTrigger and maxBytesPerTrigger are for streaming queries")
    whole = options.flag("wholeStreams")
    if whole and options.count("minPartitions"):
        raise_option_error("wholeStreams and minPartitions exclude each other")
    for positions in (starting, ending):
        if isinstance(positions, dict) and streams and (strange := set(positions) - set(streams)):
            raise_option_error(f"offsets are given for {', '.join(sorted(strange))}, which is not read")
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
            SEALED_ENTRIES_MIN if (least := options.count("sealedEntriesMin", 0)) is None else least
        ),
        whole_streams=whole,
    )


def _parse_streams(options: OptionReader) -> tuple[tuple[str, ...], str | None]:
    """The streams that are read: names, or a glob."""
    names, path, pattern = options.get("stream"), options.get("path"), options.get("streamPattern")
    if names and path:
        raise_option_error("stream and load(...) name the streams twice; use one of them")
    names = names or path
    if (names is None) == (pattern is None):
        raise_option_error("exactly one of stream and streamPattern says what to read")
    if pattern is not None:
        return (), pattern.strip()
    assert names is not None
    streams = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not streams:
        raise_option_error("stream names no stream")
    if len(streams) > STREAMS_MAX:
        raise_option_error(f"{len(streams)} streams are more than the {STREAMS_MAX} that one read may have")
    return streams, None


def _parse_bound(
    options: OptionReader, which: str, words: tuple[str, ...]
) -> tuple[Positions | None, int | None]:
    """One end of what is read: offsets, or a time."""
    offsets, instant = options.get(f"{which}Offsets"), options.get(f"{which}Timestamp")
    if offsets is not None and instant is not None:
        raise_option_error(f"{which}Offsets and {which}Timestamp exclude each other")
    if instant is not None:
        return None, _parse_instant_ns(f"{which}Timestamp", instant.strip())
    if offsets is None or offsets.strip().lower() in words:
        return None if offsets is None else offsets.strip().lower(), None
    try:
        positions: Any = msgspec.json.decode(offsets, type=dict[str, str])
    except msgspec.MsgspecError:
        raise_option_error(
            f'{which}Offsets is {" or ".join(words)}, or JSON such as {{"events": "<offset>"}}'
        )
    return positions, None


def _parse_instant_ns(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text) * 1_000_000  # Unix milliseconds, as Spark's other sources take them
    instant_ns = parse_rfc3339_ns(text)
    if instant_ns is None:
        raise_option_error(f"{name} is RFC 3339 or Unix milliseconds, not {text!r}")
    return instant_ns


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
