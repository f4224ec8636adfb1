"""Exactly once: what the producer does with every answer, also with those it did not get."""

from __future__ import annotations

import pytest

from support.steps import OFFSET, Stage, answer, header
from tailrace.client.errors import ClientError
from tailrace.client.operations import StreamOperations
from tailrace.client.producer import SEQ_MAX, BatchSequencer, ProducerOptions
from tailrace.client.transport import BrokenConnectionError, Retries
from tailrace.client.wire import HttpRequest, HttpResponse

CUT = BrokenConnectionError("reset", sent=True)


def accepted(seq: int, epoch: int = 0) -> HttpResponse:
    return answer(200, stream_next_offset=OFFSET, producer_epoch=str(epoch), producer_seq=str(seq))


def duplicate(highest: int, epoch: int = 0) -> HttpResponse:
    return answer(204, stream_next_offset=OFFSET, producer_epoch=str(epoch), producer_seq=str(highest))


def gap(expected: int) -> HttpResponse:
    body = b'{"error":{"code":"producer_gap","message":"gap"}}'
    return answer(409, body, producer_expected_seq=str(expected), producer_received_seq=str(SEQ_MAX))


def stale(current: int) -> HttpResponse:
    body = b'{"error":{"code":"stale_epoch","message":"stale","current_epoch":%d}}' % current
    return answer(403, body, producer_epoch=str(current))


NEWER_EPOCH = answer(400, b'{"error":{"code":"invalid_header","message":"a new epoch starts at 0"}}')


def sequencer(producer_id: str | None = None, epoch: int = 0, *, auto_claim: bool = True) -> BatchSequencer:
    options = ProducerOptions(producer_id=producer_id, epoch=epoch, auto_claim=auto_claim)
    return BatchSequencer(StreamOperations("s", Retries(), "application/json"), options)


def numbers(requests: list[HttpRequest]) -> list[tuple[int, int]]:
    return [
        (int(header(r, "Producer-Epoch") or b"-1"), int(header(r, "Producer-Seq") or b"-1")) for r in requests
    ]


def test_batches_are_numbered() -> None:
    stage = Stage(accepted(0), accepted(1))
    producer = sequencer()
    stage.run(producer.deliver([b"1", b"2"], None))
    stage.run(producer.deliver([b"3"], "k"))
    assert numbers(stage.requests) == [(0, 0), (0, 1)]
    assert [request.body for request in stage.requests] == [b"[1,2]", b"[3]"]
    assert header(stage.requests[1], "Stream-Key") == b"k"


@pytest.mark.parametrize("fault", [CUT, answer(408), answer(500), answer(503), answer(429), answer(507)])
def test_a_retry_carries_the_same_number(fault: HttpResponse | BrokenConnectionError) -> None:
    stage = Stage(fault, fault, accepted(0), accepted(1))
    producer = sequencer()
    stage.run(producer.deliver([b"1"], None))
    stage.run(producer.deliver([b"2"], None))
    assert numbers(stage.requests) == [(0, 0), (0, 0), (0, 0), (0, 1)]


def test_a_duplicate_after_a_lost_answer_is_success() -> None:
    result = Stage(CUT, duplicate(0)).run(sequencer().deliver([b"1"], None))
    assert result.duplicate


@pytest.mark.parametrize(
    ("told", "epoch"), [(gap(0), 0), (gap(58), 1), (stale(4), 5), (NEWER_EPOCH, 0)], ids=str
)
def test_a_named_producer_asks_before_it_writes(told: HttpResponse, epoch: int) -> None:
    stage = Stage(told, accepted(0, epoch))
    producer = sequencer("me")
    stage.run(producer.deliver([b"1"], None))
    assert numbers(stage.requests) == [(0, SEQ_MAX), (epoch, 0)]
    assert producer.epoch == epoch


def test_what_asking_reveals_is_not_swallowed() -> None:
    closed = answer(409, b'{"error":{"code":"stream_closed","message":"closed"}}', stream_closed="true")
    with pytest.raises(ClientError) as caught:
        Stage(closed).run(sequencer("me").deliver([b"1"], None))
    assert caught.value.code == "stream_closed"


def test_a_rival_between_asking_and_writing_is_noticed() -> None:
    # Both were told that epoch 1 is free; the other one was faster. Its success is not ours.
    stage = Stage(gap(5), duplicate(0, 1), accepted(0, 2))
    producer = sequencer("me")
    stage.run(producer.deliver([b"1"], None))
    assert numbers(stage.requests) == [(0, SEQ_MAX), (1, 0), (2, 0)]


def test_a_rival_with_a_newer_epoch_is_overtaken_before_the_first_batch() -> None:
    stage = Stage(gap(0), stale(3), accepted(0, 4))
    stage.run(sequencer("me").deliver([b"1"], None))
    assert numbers(stage.requests) == [(0, SEQ_MAX), (0, 0), (4, 0)]


def test_a_replaced_producer_does_not_fight_back() -> None:
    stage = Stage(accepted(0), stale(1))
    producer = sequencer()
    stage.run(producer.deliver([b"1"], None))
    with pytest.raises(ClientError) as caught:
        stage.run(producer.deliver([b"2"], None))
    assert caught.value.code == "stale_epoch"
    assert not caught.value.outcome_unknown


def test_no_claim_while_the_batch_may_be_stored() -> None:
    # A batch that may be in under the old epoch must not be written again under a new one.
    with pytest.raises(ClientError) as caught:
        Stage(gap(0), CUT, stale(1)).run(sequencer("me").deliver([b"1"], None))
    assert caught.value.code == "stale_epoch"
    assert caught.value.outcome_unknown


def test_a_duplicate_that_is_ahead_of_us_is_not_ours() -> None:
    with pytest.raises(ClientError) as caught:
        Stage(CUT, duplicate(7)).run(sequencer().deliver([b"1"], None))
    assert caught.value.outcome_unknown


def test_without_auto_claim_the_epoch_is_the_callers() -> None:
    stage = Stage(stale(9))
    with pytest.raises(ClientError) as caught:
        stage.run(sequencer("me", 7, auto_claim=False).deliver([b"1"], None))
    assert caught.value.code == "stale_epoch"
    assert caught.value.extra == {"current_epoch": 9}
    assert numbers(stage.requests) == [(7, 0)]
    with pytest.raises(ClientError) as caught:
        Stage(duplicate(3, 7)).run(sequencer("me", 7, auto_claim=False).deliver([b"1"], None))
    assert caught.value.code == "producer_conflict"


def test_ids_of_their_own_differ() -> None:
    assert sequencer().producer_id != sequencer().producer_id


# -- closing the stream


def closed(status: int, seq: int, epoch: int = 0) -> HttpResponse:
    return answer(
        status,
        stream_next_offset=OFFSET,
        stream_closed="true",
        producer_epoch=str(epoch),
        producer_seq=str(seq),
    )


def test_a_close_carries_the_next_number_and_the_last_data() -> None:
    stage = Stage(accepted(0), closed(200, 1))
    producer = sequencer()
    stage.run(producer.deliver([b"1"], None))
    result = stage.run(producer.deliver([b"2"], "k", close=True))
    assert numbers(stage.requests) == [(0, 0), (0, 1)]
    last = stage.requests[-1]
    assert (last.body, header(last, "Stream-Closed"), header(last, "Stream-Key")) == (b"[2]", b"true", b"k")
    assert (result.closed, result.duplicate) == (True, False)


def test_a_close_without_data_is_no_duplicate() -> None:
    stage = Stage(closed(204, 0))
    result = stage.run(sequencer().deliver([], None, close=True))
    (request,) = stage.requests
    assert (request.body, header(request, "Stream-Closed"), header(request, "Content-Type")) == (
        b"",
        b"true",
        None,
    )
    assert (result.closed, result.duplicate) == (True, False)


@pytest.mark.parametrize("parts", [[], [b"1"]])
def test_a_close_whose_answer_was_lost_is_repeated_under_its_number(parts: list[bytes]) -> None:
    stage = Stage(CUT, closed(204, 0))
    assert stage.run(sequencer().deliver(parts, None, close=True)).closed
    assert numbers(stage.requests) == [(0, 0), (0, 0)]


def test_a_close_under_a_number_that_another_writer_used_is_not_taken_for_done() -> None:
    stage = Stage(duplicate(4))
    with pytest.raises(ClientError) as raised:
        stage.run(sequencer("p", auto_claim=False).deliver([], None, close=True))
    assert raised.value.code == "producer_conflict"


def test_a_close_asks_for_the_type_if_it_has_to_claim_an_epoch() -> None:
    head = answer(200, content_type="application/json", stream_next_offset=OFFSET)
    stage = Stage(head, gap(3), closed(204, 0, 1))
    producer = BatchSequencer(StreamOperations("s", Retries()), ProducerOptions(producer_id="p"))
    assert stage.run(producer.deliver([], None, close=True)).closed
    assert producer.epoch == 1
