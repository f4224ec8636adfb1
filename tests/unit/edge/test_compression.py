"""Compressing on the way out: who wants it, what is worth it, and that it is done once."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from tailrace.edge import cache
from tailrace.edge.cache import Slice, SliceCompressor, accepts_gzip, is_compressible

JSON = [(b"Content-Type", b"application/json")]


@pytest.mark.parametrize(
    ("accepted", "wanted"),
    [
        (b"", False),
        (b"gzip", True),
        (b"deflate, GZIP;q=0.5, br", True),
        (b"x-gzip ; q=1.0", True),
        (b"gzip;q=0", False),
        (b"gzip; q=0.000, br", False),
        (b"identity", False),
        (b"br, zstd", False),
    ],
)
def test_who_wants_it(accepted: bytes, wanted: bool) -> None:
    assert accepts_gzip(accepted) is wanted


def test_what_is_worth_it() -> None:
    assert is_compressible(Slice(JSON, b"x" * 1024, 0.0))
    assert not is_compressible(Slice(JSON, b"x" * 1023, 0.0))
    assert not is_compressible(Slice([(b"Content-Type", b"image/png")], b"x" * 5000, 0.0))


@pytest.mark.parametrize("size", [2000, 200_000])
def test_it_is_done_once_and_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(cache, "COMPRESSED_BYTES_MAX", 3 * size)

    async def run() -> None:
        packer = SliceCompressor()
        slices = [Slice(JSON, b"[%d]" % number * (size // 3), 0.0) for number in range(5)]
        first = await packer.compress(slices[0])
        assert gzip.decompress(first) == slices[0].body
        assert await packer.compress(slices[0]) is first
        for found in slices[1:]:
            await packer.compress(found)
        assert await packer.compress(slices[0]) is not first, "it had made room for others"

    asyncio.run(run())
