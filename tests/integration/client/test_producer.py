"""The idempotent producer on a real server: nothing lost, nothing doubled, whatever the network does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.clients import OpenClient, name, open_client
from support.cutting_proxy import CuttingProxy, at_random, lose_answers
from support.server import ServerProcess
from tailrace.client import ClientError

__all__ = ["name", "open_client"]

JSON = "application/json"


def test_batches(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    with CuttingProxy(server.port) as proxy:
        stream = open_client(proxy.base_url).stream(name, content_type=JSON)
        stream.create()
        before = proxy.requests
        with stream.producer(linger_s=0.05) as producer:
            for number in range(5000):
                producer.append(number)
            producer.flush()
            assert stream.read().next_offset is not None
        assert list(stream.entries()) == list(range(5000))
        # Far fewer pieces than messages passed: they went out in batches.
        assert proxy.requests - before < 500


def test_receipts(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with stream.producer() as producer:
        first = producer.append({"n": 1}).result()
        second = producer.append([2, 3], key="k").result()
        assert stream.head().next_offset == second.next_offset
        assert first.next_offset < second.next_offset
        assert not second.duplicate
    assert stream.read(key="k").entries == [2, 3]


def test_keys_keep_the_order(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with stream.producer(linger_s=0.05) as producer:
        for number in range(30):
            producer.append(number, key=f"k{number % 3}")
    assert list(stream.entries()) == list(range(30))
    assert list(stream.entries(key="k1")) == list(range(1, 30, 3))


def test_bytes(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type="text/plain")
    stream.create()
    with stream.producer() as producer:
        producer.append_many(f"line {number}\n" for number in range(100))
    assert b"".join(stream.entries()) == b"".join(b"line %d\n" % number for number in range(100))


def test_more_than_fits_waits(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with stream.producer(inflight_bytes_max=1000, batch_bytes_max=400) as producer:
        for number in range(200):
            producer.append({"n": number, "pad": "x" * 100})
        producer.append("y" * 5000)
    entries = list(stream.entries())
    assert [entry["n"] for entry in entries[:-1]] == list(range(200))
    assert entries[-1] == "y" * 5000


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cut_connections_lose_and_double_nothing(
    server: ServerProcess, open_client: OpenClient, name: str, seed: int
) -> None:
    with CuttingProxy(server.port, at_random(seed, share=0.15)) as proxy:
        stream = open_client(proxy.base_url).stream(name, content_type=JSON)
        stream.create()
        with stream.producer(batch_count_max=5, linger_s=0.0) as producer:
            producer.append_many(range(500))
        assert proxy.cuts > 20
    direct = open_client(server.base_url).stream(name)
    assert list(direct.entries()) == list(range(500))


def test_an_answer_lost_after_the_commit(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    with CuttingProxy(server.port, lose_answers(3, to=b"POST")) as proxy:
        stream = open_client(proxy.base_url).stream(name, content_type=JSON)
        stream.create()
        with stream.producer() as producer:
            assert producer.append("once").result().duplicate
        assert proxy.cuts == 3
        assert list(stream.entries()) == ["once"]


def test_a_plain_append_is_not_repeated(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    with CuttingProxy(server.port, lose_answers(1, to=b"POST")) as proxy:
        stream = open_client(proxy.base_url).stream(name, content_type=JSON)
        stream.create()
        with pytest.raises(ClientError, match="may or may not be committed") as caught:
            stream.append("once")
        assert caught.value.code == "outcome_unknown"
        assert caught.value.outcome_unknown
        assert list(stream.entries()) == ["once"]


def test_a_server_killed_while_producing(
    start_server: Callable[..., ServerProcess], open_client: OpenClient, name: str
) -> None:
    server = start_server()
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    kills = [threading.Event() for _ in range(3)]

    def crash() -> None:
        for kill in kills:
            kill.wait()
            server.restart(kill=True)

    crasher = threading.Thread(target=crash)
    crasher.start()
    try:
        with stream.producer(batch_count_max=3, linger_s=0.0, inflight_bytes_max=200) as producer:
            for number in range(600):
                # Queued, not waited for: the server dies with batches on their way.
                producer.append(number)
                if number % 150 == 100 and number < 450:
                    kills[number // 150].set()
    finally:
        for kill in kills:
            kill.set()
        crasher.join()
    assert list(stream.entries()) == list(range(600))


def test_a_restarted_producer_claims_a_new_epoch(
    server: ServerProcess, open_client: OpenClient, name: str
) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    for expected in range(3):
        with stream.producer("importer") as producer:
            producer.append(expected).result()
            producer.append(f"more of {expected}").result()
            assert producer.epoch == expected
    assert list(stream.entries()) == [0, "more of 0", 1, "more of 1", 2, "more of 2"]


def test_a_newer_epoch_is_kept(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with stream.producer("p", epoch=1) as producer:
        producer.append(1)
    with stream.producer("p", epoch=7) as producer:
        producer.append(2)
    assert producer.epoch == 7
    with stream.producer("p", epoch=0) as producer:
        producer.append(3)
    assert producer.epoch == 8
    assert list(stream.entries()) == [1, 2, 3]


def test_a_replaced_producer_stops(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    old = stream.producer("p")
    old.append("old").result()
    with stream.producer("p") as new:
        new.append("new")
    receipt = old.append("zombie")
    with pytest.raises(ClientError) as caught:
        receipt.result()
    assert (caught.value.status, caught.value.code) == (403, "stale_epoch")
    for operation in (lambda: old.append("again"), old.flush, old.close):
        with pytest.raises(ClientError) as caught:
            operation()
        assert caught.value.code == "stale_epoch"
    assert list(stream.entries()) == ["old", "new"]


def test_a_given_epoch_is_not_raised(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with stream.producer("p", epoch=5) as producer:
        producer.append(1)
    with pytest.raises(ClientError) as caught, stream.producer("p", epoch=4, auto_claim=False) as late:
        late.append(2)
    assert caught.value.extra["current_epoch"] == 5
    with pytest.raises(ClientError) as caught, stream.producer("p", epoch=5, auto_claim=False) as twin:
        twin.append(3)
    assert caught.value.code == "producer_conflict"
    assert list(stream.entries()) == [1]


def test_failure_ends_the_producer_and_all_hear_of_it(
    server: ServerProcess, open_client: OpenClient, name: str
) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create(closed=True)
    producer = stream.producer(linger_s=0.0, batch_count_max=1)
    receipts: list[Any] = [producer.append("first")]
    with pytest.raises(ClientError) as caught:
        while True:
            receipts.append(producer.append("later"))
    assert caught.value.code == "stream_closed"
    for receipt in receipts:
        with pytest.raises(ClientError):
            receipt.result()
    with pytest.raises(ClientError):
        producer.close()


def test_an_error_of_the_caller_is_not_hidden(
    server: ServerProcess, open_client: OpenClient, name: str
) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with pytest.raises(ZeroDivisionError), stream.producer() as producer:
        producer.append("queued before")
        raise ZeroDivisionError
    assert list(stream.entries()) == ["queued before"]
    with pytest.raises(RuntimeError, match="closed"):
        producer.append("after")


def test_an_empty_list_is_refused(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    with stream.producer() as producer, pytest.raises(ValueError, match="empty list"):
        producer.append([])


def test_many_writers_of_one_producer(server: ServerProcess, open_client: OpenClient, name: str) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with stream.producer(inflight_bytes_max=2000) as producer:

        def write(writer: int) -> None:
            for number in range(200):
                producer.append({"w": writer, "n": number})

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entries = list(stream.entries())
    for writer in range(4):
        assert [entry["n"] for entry in entries if entry["w"] == writer] == list(range(200))


# -- closing the stream


@pytest.mark.parametrize("data", [None, {"last": True}, [1, 2]])
def test_a_producer_closes_its_stream(
    server: ServerProcess, open_client: OpenClient, name: str, data: Any
) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    with stream.producer() as producer:
        for number in range(100):
            producer.append(number)
        result = producer.close_stream(data)
        assert (result.closed, result.duplicate) == (True, False)
        with pytest.raises(RuntimeError, match="closed"):
            producer.append("late")
    last = [] if data is None else data if isinstance(data, list) else [data]
    assert list(stream.entries()) == [*range(100), *last]
    assert stream.head().closed
    assert stream.head().next_offset == result.next_offset


def test_a_producer_that_appended_nothing_closes_its_stream(
    server: ServerProcess, open_client: OpenClient, name: str
) -> None:
    client = open_client(server.base_url)
    client.stream(name, content_type=JSON).create()
    stream = client.stream(name)
    with stream.producer("closer") as producer:
        assert producer.close_stream().closed
    assert stream.head().closed


def test_a_close_whose_answer_is_lost_takes_effect_once(
    server: ServerProcess, open_client: OpenClient, name: str
) -> None:
    with CuttingProxy(server.port, lose_answers(2, to=b"POST")) as proxy:
        stream = open_client(proxy.base_url).stream(name, content_type=JSON)
        stream.create()
        with stream.producer() as producer:
            assert producer.close_stream("last").closed
        assert proxy.cuts == 2
        assert list(stream.entries()) == ["last"]


def test_a_replaced_producer_cannot_close_the_stream(
    server: ServerProcess, open_client: OpenClient, name: str
) -> None:
    stream = open_client(server.base_url).stream(name, content_type=JSON)
    stream.create()
    first = stream.producer("importer")
    first.append(1)
    first.flush()
    with stream.producer("importer") as second:
        second.append(2)
        second.flush()
        with pytest.raises(ClientError) as raised:
            first.close_stream()
        assert (raised.value.code, raised.value.stream) == ("stale_epoch", name)
        assert not stream.head().closed
        assert second.close_stream().closed
    assert list(stream.entries()) == [1, 2]
