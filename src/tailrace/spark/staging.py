"""Where rows of a batch wait until it commits, and the one document that says which of them count.

A task writes its rows to files, in the order in which they will be sent. The commit creates `COMMIT.json`,
which lists them, and only then sends. A batch that is run again finds the document and sends what **it**
lists, whatever the rows of the new run are: so each batch has one content, however often it is run.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from threading import Lock

import msgspec
import numpy as np

from tailrace.spark.sink_appends import SinkAppend, value_ends
from tailrace.spark.sink_rows import SinkError
from tailrace.storage.object_store.interface import (
    BlockingRunner,
    ObjectExistsError,
    ObjectStore,
    open_object_store,
)
from tailrace.storage.segments.parquet import BINARY, INT32, STRING, integer_array, pa, pq

FILE_BYTES_MAX = 32 << 20  # of rows in one file of a partition
INLINE_BYTES_MAX = 256 << 10  # of rows that a task hands over without a file
COMMIT_BYTES_MAX = 4 << 20  # of rows that the document itself holds
BATCHES_KEPT = 2
_PART_SCHEMA = pa.schema([("append", INT32), ("stream", STRING), ("key", STRING), ("value", BINARY)])


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows of one partition: in a file, or right here."""

    partition: int
    rows: int
    sha256: str
    file: str | None = None
    inline: bytes | None = None


class BatchCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch consists of."""

    version: int = 1
    query: str
    batch: int
    parts: list[StagedPart]


def encode_parts(appends: Iterable[SinkAppend]) -> Iterator[tuple[int, bytes]]:
    """Appends as Parquet, a few MiB at a time, with the number of their rows."""
    kept: list[SinkAppend] = []
    size = 0
    for append in appends:
        kept.append(append)
        size += int(value_ends(append.values)[-1])
        if size >= FILE_BYTES_MAX:
            yield _encode_part(kept)
            kept, size = [], 0
    if kept:
        yield _encode_part(kept)


def _encode_part(appends: list[SinkAppend]) -> tuple[int, bytes]:
    counts = [len(append.values) for append in appends]
    numbers = np.repeat(np.arange(len(appends), dtype=np.int32), counts)
    places = integer_array(INT32, numbers, len(numbers))
    columns = [
        places,
        pa.array([append.stream for append in appends], STRING).take(places),
        pa.array([append.key for append in appends], STRING).take(places),
        pa.chunked_array([append.values for append in appends], BINARY),
    ]
    sink = pa.BufferOutputStream()
    table = pa.table(columns, schema=_PART_SCHEMA)
    # Written once, read once, then gone: that is no occasion for a denser format.
    pq.write_table(table, sink, compression="lz4", use_dictionary=["stream", "key"], write_statistics=False)
    data: bytes = sink.getvalue().to_pybytes()
    return len(numbers), data


def decode_part(data: bytes) -> Iterator[SinkAppend]:
    """The appends of a part, as they were cut."""
    table = pq.read_table(pa.BufferReader(data), use_threads=False).combine_chunks()
    numbers = table.column("append").to_numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    first = table.select(["stream", "key"]).take(starts)
    streams: list[str] = first.column("stream").to_pylist()
    keys: list[str | None] = first.column("key").to_pylist()
    values = table.column("value").chunk(0)
    edges = [*starts.tolist(), len(numbers)]
    for stream, key, (start, stop) in zip(streams, keys, pairwise(edges), strict=True):
        yield SinkAppend(stream, key, values.slice(start, stop - start))


def build_part(partition: int, rows: int, data: bytes) -> StagedPart:
    return StagedPart(partition=partition, rows=rows, sha256=hashlib.sha256(data).hexdigest(), inline=data)


class StagingArea:
    """One staging location, as blocking calls. Made where it is needed; never pickled."""

    def __init__(self, url: str) -> None:
        self._steps = BlockingRunner()
        self._objects: ObjectStore = open_object_store(url)
        self._lock = Lock()

    def close(self) -> None:
        self._steps.run(self._objects.close())
        self._steps.close()

    def put(self, query: str, batch: int, part: StagedPart) -> StagedPart:
        """Writes the rows of a part to a file of its own."""
        assert part.inline is not None
        name = f"{part.partition:06}-{secrets.token_hex(8)}.parquet"
        self._steps.run(self._objects.create(_batch_folder(query, batch) + name, part.inline))
        return msgspec.structs.replace(part, file=name, inline=None)

    def rows(self, commit: BatchCommit, part: StagedPart) -> bytes:
        if part.inline is not None:
            return part.inline
        key = _batch_folder(commit.query, commit.batch) + str(part.file)
        with self._lock:  # several partitions are sent at once
            data, _ = self._steps.run(self._objects.get(key))
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise SinkError(f"{key} is not what was staged; nothing of it was sent")
        return data

    def settle(self, commit: BatchCommit) -> tuple[BatchCommit, bool]:
        """The content of the batch: what is given, unless it has one already; and whether it is new.

        A driver that was thought dead may commit when others are batches ahead and what the batch consisted
        of has been swept. Its rows are there already, perhaps from other partitions, so that no number of an
        append would give it away: it is refused. Later batches are looked for after the document is created:
        whoever swept the one before had created a later one by then.
        """
        settled = commit
        if sum(len(part.inline or b"") for part in commit.parts) > COMMIT_BYTES_MAX:
            parts = [
                part if part.inline is None else self.put(commit.query, commit.batch, part)
                for part in commit.parts
            ]
            settled = msgspec.structs.replace(commit, parts=parts)
        key = _commit_key(commit.query, commit.batch)
        try:
            self._steps.run(self._objects.create(key, msgspec.json.encode(settled)))
        except ObjectExistsError:
            data, _ = self._steps.run(self._objects.get(key))
            return msgspec.json.decode(data, type=BatchCommit), False
        if self._steps.run(self._objects.list_after(f"{commit.query}/", key, 1)):
            self.forget(commit.query, commit.batch)
            raise SinkError(
                f"batch {commit.batch} was committed by another run of the same query, which is ahead; "
                "nothing of it was sent. Stop one of them"
            )
        return settled, True

    def forget(self, query: str, batch: int) -> None:
        """Takes a commit back of which nothing was accepted."""
        self._steps.run(self._objects.delete([_commit_key(query, batch)]))

    def discard(self, query: str, batch: int, names: Sequence[str]) -> None:
        self._steps.run(self._objects.delete([_batch_folder(query, batch) + name for name in names]))

    def sweep(self, query: str, batch: int) -> None:
        """Removes all batches before the last one: nobody will run them again."""
        listed = self._steps.run(self._objects.list_after(f"{query}/"))
        kept = _batch_folder(query, max(0, batch - BATCHES_KEPT + 1))
        self._steps.run(self._objects.delete([info.key for info in listed if info.key < kept]))


def _batch_folder(query: str, batch: int) -> str:
    return f"{query}/{batch:020}/"


def _commit_key(query: str, batch: int) -> str:
    return _batch_folder(query, batch) + "COMMIT.json"
