"""Cuts rows into appends, a column at a time. The same rows in the same order give the same appends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.spark.sink_options import WriteOptions
from tailrace.spark.sink_rows import SinkError, SinkRows, group_by_code
from tailrace.storage.segments.parquet import STRING, pa, pc

_VALUE_END = 1 << 40  # the end of every value
_json_decoder = msgspec.json.Decoder(msgspec.Raw)
_json_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class SinkAppend(NamedTuple):
    """Rows that are sent together: one target, one key. `values` is a column of bytes."""

    stream: str
    key: str | None
    values: Any


def split_into_appends(
    rows: Iterator[SinkRows], options: WriteOptions, is_json: Callable[[str], bool]
) -> Iterator[SinkAppend]:
    """A chunk has rows of one target up to the limits; inside it, rows with the same key go together.

    Chunks of a target follow one another as their rows did, wherever the columns they came in were cut.
    """
    chunks: dict[str, _AppendBuffer] = {}
    for some in rows:
        chunk = chunks.get(some.stream)
        if chunk is None:
            chunk = chunks[some.stream] = _AppendBuffer(some.stream, options, is_json(some.stream))
        yield from chunk.add(some)
    for chunk in chunks.values():
        yield from chunk.close()


class _AppendBuffer:
    """Rows of one target that wait until the next one does not fit."""

    def __init__(self, stream: str, options: WriteOptions, json: bool) -> None:
        self._stream = stream
        self._rows_max = options.rows_max
        self._bytes_max = options.bytes_max
        self._json = json
        self._kept: list[SinkRows] = []
        self._rows = 0
        self._bytes = 0  # with a comma behind each row

    def add(self, some: SinkRows) -> Iterator[SinkAppend]:
        """Takes rows, and gives the appends that are full."""
        ends = value_ends(some.values)
        weights = ends + np.arange(1, len(ends) + 1)  # of all rows up to each one, with their commas
        at = 0
        while at < len(ends):
            weight = int(weights[at - 1]) if at else 0
            # The last row of a chunk needs no comma.
            limit = self._bytes_max + 1 - self._bytes + weight
            upto = min(int(np.searchsorted(weights, limit, "right")), at + self._rows_max - self._rows)
            if not self._rows:
                upto = max(upto, at + 1)  # a row that is larger than the limit goes alone
            if upto > at:
                self._kept.append(some.slice(at, upto))
                self._rows += upto - at
                self._bytes += int(weights[upto - 1]) - weight
                at = upto
            if at < len(ends):
                yield from self.close()

    def close(self) -> Iterator[SinkAppend]:
        if not self._kept:
            return
        values = _concat_arrays([some.values for some in self._kept])
        keys = _concat_keys(self._kept)
        self._kept, self._rows, self._bytes = [], 0, 0
        if self._json:
            check_json(self._stream, values)
        if keys is None:
            yield SinkAppend(self._stream, None, values)
            return
        found = keys.dictionary_encode(null_encoding="encode")
        for key, indices in group_by_code(found.dictionary.to_pylist(), found.indices):
            yield SinkAppend(self._stream, key, values.take(indices))


def value_ends(values: Any) -> Any:
    """How many bytes there are in all values up to each one."""
    positions = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset)
    return positions[1:].astype(np.int64) - positions[0]


def json_array(values: Any) -> bytes:
    """JSON texts as one array, without a look at each of them."""
    separated = pc.binary_replace_slice(values, _VALUE_END, _VALUE_END, b",")
    _, positions, data = separated.buffers()
    at = np.frombuffer(positions, np.int32, len(separated) + 1, 4 * separated.offset)
    return b"".join((b"[", memoryview(data)[int(at[0]) : int(at[-1]) - 1], b"]"))


def check_json(stream: str, values: Any) -> None:
    """Refuses what is not exactly one JSON text: joined with others it would become another row, or none.

    All are looked at together: if the elements of their array are as long as they are, they are its elements,
    since then nothing is left that could stand between two of them but the commas.
    """
    try:
        found = _json_array_decoder.decode(json_array(values))
    except (msgspec.DecodeError, RecursionError):
        found = []
    if list(map(len, found)) != np.diff(value_ends(values), prepend=0).tolist():
        for value in values.to_pylist():
            _check_json_value(stream, value)


def _check_json_value(stream: str, value: bytes) -> None:
    try:
        _json_decoder.decode(value)
    except msgspec.DecodeError as error:
        shown = value[:60].decode(errors="replace")
        raise SinkError(
            f"a value for JSON stream {stream} is not one JSON text: {shown!r} ({error})"
        ) from None


def _concat_keys(kept: list[SinkRows]) -> Any:
    """The keys of all rows; None if no row has one."""
    if all(some.keys is None for some in kept):
        return None
    return _concat_arrays(
        [pa.nulls(len(some.values), STRING) if some.keys is None else some.keys for some in kept]
    )


def _concat_arrays(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
