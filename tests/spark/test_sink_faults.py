"""The sink below Spark, on a real server that a proxy cuts off at every single request."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import WriterCommitMessage

from support.cutting_proxy import CuttingProxy, Direction
from support.server import ServerProcess
from support.spark_batches import Drivers
from support.wire import fresh
from tailrace.client import Client, ClientError
from tailrace.spark.options import WriteOptions, parse_write_options
from tailrace.spark.sink import BatchCommitter, PartitionWriter
from tailrace.spark.sink_rows import SinkError

METHODS = (b"GET ", b"HEAD ", b"PUT ", b"POST ")
Rows = Sequence[tuple[str | None, str]]


def written_by(
    options: WriteOptions, query: str, batch: int, partitions: Sequence[Rows]
) -> list[WriterCommitMessage | None]:
    """The tasks of one micro-batch."""
    return [
        PartitionWriter(options, query, batch, number).write(
            iter([pa.record_batch({"key": [key for key, _ in rows], "value": [value for _, value in rows]})])
        )
        for number, rows in enumerate(partitions)
        if rows
    ]


def run_batch(options: WriteOptions, query: str, batch: int, partitions: Sequence[Rows]) -> None:
    """What Spark does with one micro-batch: all tasks, then the commit."""
    BatchCommitter(options).commit(written_by(options, query, batch, partitions), batch)


def contents(server: ServerProcess, stream: str) -> list[str]:
    with Client(server.base_url) as client:
        return [json.dumps(entry) for entry in client.stream(stream).entries()]


def table(batch: int, bulk: int = 0) -> list[list[tuple[str | None, str]]]:
    """Rows of one batch, in partitions: some with keys, some not."""
    generator = random.Random(batch)
    filling = "".join(generator.choices("abcdefghijklmnop", k=bulk))
    return [
        [
            ([None, "a", "b"][number % 3] if part else None, json.dumps(f"{batch}-{part}-{number}{filling}"))
            for number in range(6)
        ]
        for part in range(2)
    ]


class CutAt:
    """Cuts the n-th request before the server sees it, or the answer to it."""

    def __init__(self, number: int, direction: Direction) -> None:
        self._number = number
        self._direction = direction
        self._seen = 0

    def __call__(self, direction: Direction, piece: bytes) -> bool:
        if direction == "request" and piece.startswith(METHODS):
            self._seen += 1
        return direction == self._direction and self._seen == self._number and self._once()

    def _once(self) -> bool:
        self._number = 0
        return True

    @property
    def passed(self) -> int:
        return self._seen


def drive(
    server: ServerProcess, tmp_path: Path, number: int, direction: Direction, delivery: str, bulk: int = 0
) -> tuple[list[str], list[str], int]:
    """Two batches through a proxy that cuts once; what was written, what is there, requests in all."""
    stream, query = fresh("sink"), f"q{number}{direction}{delivery}"
    cut = CutAt(number, direction)
    written: list[str] = []
    with CuttingProxy(server.port, cut) as proxy:
        options = parse_write_options(
            {
                "endpoint": proxy.base_url,
                "stream": stream,
                "delivery": delivery,
                "batchRows": "3",
                "retries": "0",
                "requestTimeout": "20",
                "stagingLocation": str(tmp_path / "staging"),
            },
            streaming=True,
        )
        for batch in range(2):
            partitions: list[Rows] = [*table(batch, bulk)]
            written += [value for part in partitions for _, value in part]
            for attempt in range(4):
                try:
                    run_batch(options, query, batch, partitions)
                    break
                except (ClientError, SinkError):
                    assert attempt < 3
                    if delivery == "staged":
                        # Another run of the batch: other partitions, another order.
                        rows = [row for part in partitions for row in part]
                        random.Random(number).shuffle(rows)
                        partitions = [rows[:2], rows[2:5], rows[5:]]
    return written, contents(server, stream), cut.passed


@pytest.mark.parametrize("direction", ["request", "answer"])
@pytest.mark.parametrize("delivery", ["staged", "direct"])
def test_p13_each_row_once_whichever_request_fails(
    server: ServerProcess, tmp_path: Path, delivery: str, direction: Direction
) -> None:
    _, _, total = drive(server, tmp_path / "none", 0, direction, delivery)
    assert total > 10
    for number in range(1, total + 1):
        written, found, _ = drive(server, tmp_path / str(number), number, direction, delivery)
        assert sorted(found) == sorted(written), f"request {number}"
        for batch in range(2):
            # Without keys, the rows of a partition stay in order.
            plain = [value for value in found if value.startswith(f'"{batch}-0-')]
            assert delivery == "staged" or plain == sorted(plain)


def test_p13_rows_in_files(server: ServerProcess, tmp_path: Path) -> None:
    """Rows that are too many to be handed over lie in files, until their batch is safely past."""
    for number in (0, 6, 9):
        written, found, _ = drive(server, tmp_path / str(number), number, "answer", "staged", bulk=400_000)
        assert sorted(found) == sorted(written)


def test_p13_what_was_committed_once_is_sent_again_as_it_was(server: ServerProcess, tmp_path: Path) -> None:
    """A repeated batch with quite other rows, as a query with random numbers has them."""
    stream = fresh("sink")
    options = parse_write_options(
        {"endpoint": server.base_url, "stream": stream, "stagingLocation": str(tmp_path)}, streaming=True
    )
    run_batch(options, "q", 0, [[(None, '"first"')], [(None, '"second"')]])
    run_batch(options, "q", 0, [[(None, '"other"')], [(None, '"rows"')], [(None, '"altogether"')]])
    assert sorted(contents(server, stream)) == ['"first"', '"second"']


def test_a_second_run_of_the_query_is_told(server: ServerProcess, tmp_path: Path) -> None:
    stream = fresh("sink")
    given = {"endpoint": server.base_url, "stream": stream, "delivery": "direct"}
    options = parse_write_options(given, streaming=True)
    run_batch(options, "q", 5, [[(None, "1")]])
    with pytest.raises(SinkError, match="another run of the same query"):
        run_batch(options, "q", 4, [[(None, "2")]])
    assert contents(server, stream) == ["1"]


def test_a_refused_batch_may_be_corrected(server: ServerProcess, tmp_path: Path) -> None:
    """Nothing of it was stored, so what it was to contain is not fixed for ever."""
    stream = fresh("sink")
    with Client(server.base_url) as client:
        client.stream(stream, content_type="application/json").create()
        from support.wire import Wire

        http = Wire(server.port)
        schema = json.dumps({"schema": {"type": "integer"}})
        assert http.post(f"{stream}/_schema", "application/json", schema).status == 200
        http.close()
    options = parse_write_options(
        {"endpoint": server.base_url, "stream": stream, "stagingLocation": str(tmp_path)}, streaming=True
    )
    with pytest.raises(SinkError, match="not of type"):
        run_batch(options, "q", 0, [[(None, '"text"')]])
    run_batch(options, "q", 0, [[(None, "7")]])
    assert contents(server, stream) == ["7"]


def test_streams_that_cannot_be_written(server: ServerProcess, tmp_path: Path) -> None:
    stream = fresh("sink")
    given = {"endpoint": server.base_url, "stream": stream, "delivery": "direct", "createStream": "false"}
    with pytest.raises(SinkError, match="createStream is false"):
        run_batch(parse_write_options(given, streaming=True), "q", 0, [[(None, "1")]])
    with Client(server.base_url) as client:
        client.stream(stream, content_type="text/plain").create(closed=True, body=b"x")
    with pytest.raises(SinkError, match="is closed"):
        run_batch(parse_write_options(given, streaming=True), "q", 0, [[(None, "1")]])


def test_each_row_of_bytes_is_an_entry(server: ServerProcess, tmp_path: Path) -> None:
    stream = fresh("sink")
    options = parse_write_options(
        {"endpoint": server.base_url, "stream": stream, "contentType": "text/plain", "producerId": "once"},
        streaming=False,
    )
    for _ in range(2):  # the second time has no effect
        run_batch(options, "once", 0, [[(None, "a"), ("k", "b"), (None, "c")]])
    from support.spark_rows import served

    rows = served(server, stream)
    assert [(row["payload"], row["key"]) for row in rows] == [(b"a", None), (b"c", None), (b"b", b"k")]


def test_staging_of_old_batches_goes(server: ServerProcess, tmp_path: Path) -> None:
    options = parse_write_options(
        {"endpoint": server.base_url, "stream": fresh("sink"), "stagingLocation": str(tmp_path)},
        streaming=True,
    )
    for batch in range(4):
        run_batch(options, "q", batch, table(batch, 400_000))
    assert sorted(int(path.name) for path in (tmp_path / "q").iterdir()) == [2, 3]


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_p13_a_commit_that_lags_behind_adds_nothing(
    server: ServerProcess, tmp_path: Path, ahead: int
) -> None:
    """A driver that was thought dead has written a batch in three partitions. Another one wrote it in one,
    and went on; what the batch consisted of may be swept by now."""
    stream = fresh("sink")
    options = parse_write_options(
        {"endpoint": server.base_url, "stream": stream, "stagingLocation": str(tmp_path)}, streaming=True
    )
    rows: Rows = [(None, f'"{number}"') for number in range(6)]
    late = written_by(options, "q", 0, [rows[:2], rows[2:4], rows[4:]])
    run_batch(options, "q", 0, [rows])
    later = [(None, f'"later-{batch}"') for batch in range(1, ahead + 1)]
    for batch, row in enumerate(later, 1):
        run_batch(options, "q", batch, [[row]])
    with pytest.raises(SinkError, match="another run of the same query"):
        BatchCommitter(options).commit(late, 0)
    assert sorted(contents(server, stream)) == sorted(value for _, value in [*rows, *later])


def test_staging_goes_although_batches_were_empty(server: ServerProcess, tmp_path: Path) -> None:
    options = parse_write_options(
        {"endpoint": server.base_url, "stream": fresh("sink"), "stagingLocation": str(tmp_path)},
        streaming=True,
    )
    for batch in (0, 3, 4):
        run_batch(options, "q", batch, table(batch))
    assert sorted(int(path.name) for path in (tmp_path / "q").iterdir()) == [3, 4]


def test_p13_drivers_that_are_killed_at_any_step(server: ServerProcess, tmp_path: Path) -> None:
    """A dozen times, each time with other partitions. No row is lost, none doubled."""
    source, target = fresh("from"), fresh("to")
    generator = random.Random(13)
    ended: Counter[str] = Counter()
    rows = 0
    with Client(server.base_url) as client, Drivers(server.base_url, source, target, tmp_path) as drivers:
        stream = client.stream(source, content_type="application/json")
        stream.create()
        for attempt in range(12):
            stream.append_many(list(range(rows, rows + 30)))
            rows += 30
            code, last = drivers.run(attempt, generator.randint(1, 5))
            assert code in (0, -signal.SIGKILL)
            ended[last if code else "at its end"] += 1
        assert drivers.run(99)[0] == 0
    assert {"planned", "written", "committed"} <= ended.keys()
    assert sorted(map(int, contents(server, target))) == list(range(rows))
