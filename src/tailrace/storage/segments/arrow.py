"""Arrow, as far as segments need it.

The library has no annotations, so this is where it stops being typed; what it returns is checked by the round
trip tests. It is large: nothing imports this module before a segment is really touched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs]

pa: Any = pyarrow
pc: Any = pyarrow.compute
pq: Any = pyarrow.parquet

INT16 = pa.int16()
INT32 = pa.int32()
INT64 = pa.int64()
BINARY = pa.binary()
STRING = pa.string()
MICROS = pa.timestamp("us", "UTC")


def integer_array(kind: Any, data: object, count: int) -> Any:
    """An Arrow array over the bytes of `data`. (`pyarrow.array` looks for pandas on every call.)"""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def integer_scalar(kind: Any, value: int) -> Any:
    """One number. `pyarrow.scalar` loads pandas where it is installed: half a second in a new process."""
    return integer_array(kind, value.to_bytes(kind.byte_width, "little", signed=True), 1)[0]


def string_scalar(value: str) -> Any:
    """One string, without pandas either."""
    data = value.encode()
    ends = b"".join(end.to_bytes(4, "little") for end in (0, len(data)))
    return pa.Array.from_buffers(STRING, 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])[0]


def to_python_array(code: str, numbers: Any) -> array[int]:
    """The numbers of an Arrow array without nulls as a Python array of the same width."""
    made: array[int] = array(code)
    width = made.itemsize
    made.frombytes(numbers.buffers()[1].slice(width * numbers.offset, width * len(numbers)))
    return made


def entry_schema(*, json: bool) -> Any:
    """The columns of a table of entries: those of a segment, and the epoch of each entry's offset."""
    return pa.schema(
        [
            pa.field("entry", INT64, nullable=False),
            pa.field("append_time", MICROS, nullable=False),
            pa.field("append_ns", INT16, nullable=False),
            pa.field("key", BINARY),
            pa.field("payload", STRING if json else BINARY, nullable=False),
            pa.field("epoch", INT64, nullable=False),
        ]
    )


def encode_entries(
    entries: Sequence[int],
    times: array[int],
    keys: Sequence[bytes | None],
    payloads: Sequence[bytes | memoryview],
    epochs: Sequence[int],
    *,
    json: bool,
) -> bytes:
    """Entries with what is known of them, as an Arrow stream of one batch."""
    count = len(entries)
    times_ns = integer_array(INT64, times, count)
    micros = pc.divide(times_ns, pa.scalar(1000, INT64))  # times are never before 1970
    below = pc.subtract(times_ns, pc.multiply(micros, pa.scalar(1000, INT64))).cast(INT16)
    payload = pa.array(payloads, BINARY)
    if json:
        payload = pa.Array.from_buffers(STRING, count, payload.buffers())
    schema = entry_schema(json=json)
    columns = [
        integer_array(INT64, array("q", entries), count),
        micros.view(MICROS),
        below,
        pa.array(keys, BINARY),
        payload,
        integer_array(INT64, array("q", epochs), count),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded
