"""Pages as tables: beside each entry its number, its time and its key, as a stream of Arrow record batches.

For programs that have to know where entries end and what belongs to them. The columns are those of a segment
(docs/open-format.md), and one more: the epoch that each entry's offset has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tailrace.log.model import ReadPart, Stream
from tailrace.log.reader import EntryLabels

ARROW_CONTENT_TYPE = b"Content-Type: application/vnd.apache.arrow.stream\r\n"
ARROW_PAGE_BYTES_MAX = 4 * 1024 * 1024
ARROW_THREADS = 2


class ArrowPages:
    """Makes tables on threads of its own: the library is large, and so may the pages be."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(ARROW_THREADS, "rows")

    async def encode(
        self, stream: Stream, numbers: Sequence[int], labels: EntryLabels, payloads: list[ReadPart]
    ) -> ReadPart:
        """The rows as bytes. Labels beyond the last number are passed over."""
        epochs, json = stream.epochs, stream.json
        return await self._loop.run_in_executor(
            self._threads, _encode_arrow, epochs, json, numbers, labels, payloads
        )


def _encode_arrow(
    epochs: Sequence[tuple[int, int]],
    json: bool,
    numbers: Sequence[int],
    labels: EntryLabels,
    payloads: list[ReadPart],
) -> ReadPart:
    from tailrace.storage.segments.parquet import encode_entries

    count = len(numbers)
    assert count == len(payloads) <= len(labels.times)
    return encode_entries(
        numbers,
        labels.times[:count],
        labels.keys[:count],
        payloads,
        _entry_epochs(epochs, numbers),
        json=json,
    )


def _entry_epochs(epochs: Sequence[tuple[int, int]], numbers: Sequence[int]) -> list[int]:
    """The epoch of each entry, as its offset shows it."""
    if len(epochs) == 1:
        return [epochs[0][0]] * len(numbers)
    found: list[int] = []
    index = 0
    for number in numbers:
        while index + 1 < len(epochs) and number >= epochs[index + 1][1]:
            index += 1
        found.append(epochs[index][0])
    return found
