"""Parquet's split block Bloom filters: the library writes them, and leaves reading them to others."""

from __future__ import annotations

from typing import Final

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
    """The filter itself, a power of two and at least 32 bytes, behind a header of less than 32."""
    return stored[len(stored) - (1 << (len(stored).bit_length() - 1)) :]


def bloom_may_hold(bits: memoryview, hashed: int) -> bool:
    """Whether a value may be in the filter, by its xxh64: one bit in each of the eight words of a block."""
    block = ((hashed >> 32) * (len(bits) // BLOOM_BLOCK_BYTES)) >> 32
    words = bits[block * BLOOM_BLOCK_BYTES : (block + 1) * BLOOM_BLOCK_BYTES].cast("I")
    low = hashed & _U32
    return all(word >> (((low * salt) & _U32) >> 27) & 1 for word, salt in zip(words, _SALTS, strict=True))
