"""Arrow and Parquet for segments: typed helpers, partial files, split block Bloom filters.

pyarrow has no type annotations, so this is the boundary of type checking; round trip tests check the rest. It
is large: nothing imports this module before a segment is read or written. pyarrow writes Parquet's Bloom
filters but cannot read them, so reading is implemented here.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Final

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
    """An Arrow array over the bytes of `data`. (`pyarrow.array` searches for pandas on every call.)"""
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
    """Entries with their times and keys, as an Arrow stream of one batch."""
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


class PartialFile:
    closed = False

    def __init__(self, size: int, stretches: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """`stretches` are parts of the file, each with its position."""
        self._size = size
        held = sorted(((start, pa.py_buffer(data)) for start, data in stretches), key=lambda one: one[0])
        self._starts: list[int] = [start for start, _ in held]
        self._buffers: list[Any] = [buffer for _, buffer in held]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read_buffer(self, count: int) -> Any:
        """Without a copy."""
        at = bisect_right(self._starts, self._position) - 1
        begin = self._position - self._starts[at] if at >= 0 else -1
        if begin < 0 or begin + count > self._buffers[at].size:
            raise OSError("read outside of the available ranges")
        self._position += count
        return self._buffers[at].slice(begin, count)

    def read(self, count: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        return self.read_buffer(left if count < 0 else min(count, left)).to_pybytes()

    def close(self) -> None:
        """Nothing is open."""


BLOOM_BLOCK_BYTES: Final = 32
_U32: Final = 0xFFFFFFFF
_SALTS: Final = (
    0x47B6137B,
    0x44974D91,
    0x8824AD5B,
    0xA2B7289D,
    0x705495C7,
    0x2DF1424B,
    0x9EFC4947,
    0x5C6BFB31,
)


def bloom_bits(stored: memoryview) -> memoryview:
    """The filter itself, a power of two and at least 32 bytes, after a header of less than 32."""
    return stored[len(stored) - (1 << (len(stored).bit_length() - 1)) :]


def bloom_may_hold(bits: memoryview, hashed: int) -> bool:
    """Whether a value may be in the filter, by its xxh64: one bit in each of the eight words of a block."""
    block = ((hashed >> 32) * (len(bits) // BLOOM_BLOCK_BYTES)) >> 32
    words = bits[block * BLOOM_BLOCK_BYTES : (block + 1) * BLOOM_BLOCK_BYTES].cast("I")
    low = hashed & _U32
    return all(word >> (((low * salt) & _U32) >> 27) & 1 for word, salt in zip(words, _SALTS, strict=True))
