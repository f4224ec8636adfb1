"""Segments alone, without a server: how fast they are written and read, and how large they are.

    python -m bench.cold [--mib 64] [--rounds 5]

Messages are JSON objects of words and numbers, about as compressible as logs are. Writing and decoding are
counted in processor time of one core, the best of several rounds; single reads in time on the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tailrace.common.limits import Limits
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.model import (
    SegmentFile,
    SegmentInfo,
    SegmentRows,
    make_stream_id,
    stream_prefix,
)
from tailrace.storage.segments.reader import Footer, read_row_group
from tailrace.storage.segments.writer import write_segment

WORDS = (
    "order",
    "user",
    "session",
    "click",
    "view",
    "cart",
    "price",
    "street",
    "city",
    "warn",
    "info",
    "error",
)
RUN_BYTES = 256 * 1024  # the size of a block in the hot store
SEGMENT_BYTES = 16 << 20
SINGLE_READS = 1000
STREAM = make_stream_id("bench", 0)


class Shape(NamedTuple):
    """One kind of stream."""

    message_bytes: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.message_bytes} B" + (f", {self.keys} keys" if self.keys else "")


class Figures(NamedTuple):
    shape: Shape
    write_mb_s: float
    stored_per_byte: float
    footer_per_byte: float
    decode_mb_s: float
    single_p50_ms: float
    single_p99_ms: float
    first_p50_ms: float  # single reads that have to parse their footer, too


def message(draw: random.Random, number: int, size: int) -> bytes:
    text = f'{{"id":{number},"user":"{draw.getrandbits(32):08x}","text":"'
    while len(text) < size - 2:
        text += f"{draw.choice(WORDS)} {draw.randrange(10_000)} "
    return (text[: size - 2] + '"}').encode()


def runs(shape: Shape, first: int, total_bytes: int) -> list[SegmentRows]:
    """Entries as the hot store hands them over."""
    draw = random.Random(first)
    made: list[SegmentRows] = []
    per_run = RUN_BYTES // shape.message_bytes
    entry, last = first, first + total_bytes // shape.message_bytes
    while entry < last:
        count = min(per_run, last - entry)
        messages = [message(draw, entry + index, shape.message_bytes) for index in range(count)]
        ends: array[int] = array("I")
        position = -1
        for one in messages:
            position += len(one) + 1
            ends.append(position)
        times = array(
            "q",
            [1_790_000_000_000_000_000 + (entry + i) * 50_000 + draw.randrange(50_000) for i in range(count)],
        )
        keys: list[bytes | None] | None = None
        if shape.keys:
            keys = [b"user-%d" % draw.randrange(shape.keys) for _ in range(count)]
        made.append(SegmentRows(entry, b",".join(messages), ends, times, keys))
        entry += count
    return made


def best(rounds: int, work: Callable[[], object]) -> float:
    """Seconds of processor time, in the fastest of some rounds."""
    fastest = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        work()
        fastest = min(fastest, time.process_time() - started)
    return fastest


def decode(footer: Footer, raw: memoryview) -> None:
    for index, group in enumerate(footer.row_groups):
        read_row_group(footer, index, raw[group.start : group.stop])


def percentile(seconds: Sequence[float], share: float) -> float:
    return sorted(seconds)[min(int(len(seconds) * share), len(seconds) - 1)] * 1000


async def singles(url: str, segments: list[SegmentFile], again: bool) -> list[float]:
    """Times of random reads of one entry; with `again`, of segments whose footer was used before."""
    reader = ColdReader(url, None, 0, Limits(), asyncio.get_running_loop())
    draw = random.Random(1)
    prefix = stream_prefix(STREAM)

    async def read(file: SegmentFile) -> float:
        info: SegmentInfo = file.info
        entry = draw.randint(info.first, info.last)
        started = time.perf_counter()
        (found,) = await reader.rows(prefix, info, file.footer, entry, 0)
        assert found.first <= entry <= found.last
        return time.perf_counter() - started

    await read(segments[0])  # imports
    if again:
        for file in segments:
            await read(file)
        taken = [await read(draw.choice(segments)) for _ in range(SINGLE_READS)]
    else:
        taken = [await read(file) for file in segments[1:]]
    await reader.close()
    return taken


def measure(shape: Shape, total_bytes: int, rounds: int, directory: Path) -> Figures:
    objects = directory / f"{shape.message_bytes}-{shape.keys}"
    prefix = stream_prefix(STREAM)
    (objects / prefix / "segments").mkdir(parents=True)
    segments: list[SegmentFile] = []
    write_s = decode_s = 0.0
    first = 1
    for _ in range(max(total_bytes // SEGMENT_BYTES, 2)):
        given = runs(shape, first, SEGMENT_BYTES)
        path = objects / "new"

        def write(given: list[SegmentRows] = given, path: Path = path) -> SegmentFile:
            return write_segment(given, path, name="bench", stream_id=STREAM, epoch=0, json=True)

        write_s += best(rounds, write)
        file = write()
        raw = memoryview(path.read_bytes())
        footer = Footer(file.footer)
        decode_s += best(rounds, lambda footer=footer, raw=raw: decode(footer, raw))
        path.rename(objects / prefix / file.info.key)
        segments.append(file)
        first = file.info.last + 1
    payload = sum(file.info.payload_bytes for file in segments)
    again = asyncio.run(singles(objects.as_uri(), segments, again=True))
    fresh = [
        taken
        for _ in range(rounds)
        for taken in asyncio.run(singles(objects.as_uri(), segments, again=False))
    ]
    return Figures(
        shape,
        payload / write_s / 1e6,
        sum(file.info.bytes for file in segments) / payload,
        sum(len(file.footer) for file in segments) / payload,
        payload / decode_s / 1e6,
        percentile(again, 0.5),
        percentile(again, 0.99),
        percentile(fresh, 0.5),
    )


def table(figures: Sequence[Figures]) -> str:
    head = (
        "messages | write, MB/s per core | stored per payload byte | kept footer per payload byte "
        "| decode, MB/s per core | one random entry, p50 / p99 | and its footer, p50"
    )
    lines = [f"| {head} |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row.shape.name} | {row.write_mb_s:.0f} | {row.stored_per_byte:.3f} | {row.footer_per_byte:.5f} "
        f"| {row.decode_mb_s:.0f} | {row.single_p50_ms:.2f} / {row.single_p99_ms:.2f} ms "
        f"| {row.first_p50_ms:.2f} ms |"
        for row in figures
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cold")
    parser.add_argument("--mib", type=int, default=64, help="payload for each kind of stream")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shapes = [Shape(100, 0), Shape(100, 1000), Shape(1024, 0), Shape(1024, 1000), Shape(100_000, 0)]
    with tempfile.TemporaryDirectory() as directory:
        figures = [measure(shape, options.mib << 20, options.rounds, Path(directory)) for shape in shapes]
    print(table(figures))
    print(f"\nlargest resident memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")


if __name__ == "__main__":
    main()
