"""Arrow, as far as segments need it.

The library has no annotations, so this is where it stops being typed; what it returns is checked by the round
trip tests. It is large: nothing imports this module before a segment is really touched.
"""

from __future__ import annotations

from array import array
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


def integers(kind: Any, data: object, count: int) -> Any:
    """An Arrow array over the bytes of `data`. (`pyarrow.array` looks for pandas on every call.)"""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def numbers_of(code: str, numbers: Any) -> array[int]:
    """The numbers of an Arrow array without nulls as a Python array of the same width."""
    made: array[int] = array(code)
    width = made.itemsize
    made.frombytes(numbers.buffers()[1].slice(width * numbers.offset, width * len(numbers)))
    return made
