"""When a request is sent again, when it is not, and how long the client waits."""

from __future__ import annotations

import pytest

from support.steps import OFFSET, Stage, answer
from tailrace.client import wire
from tailrace.client.errors import ClientError
from tailrace.client.operations import StreamOperations
from tailrace.client.transport import Backoff, BrokenConnectionError, Retries, exchange, retry_after_s

RETRIES = Retries()
READ = wire.read("s", offset="-1")
APPEND = wire.append("s", b"x", content_type="text/plain")
UNSENT = BrokenConnectionError("refused", sent=False)
CUT = BrokenConnectionError("reset", sent=True)
DONE = answer(204, stream_next_offset=OFFSET)


@pytest.mark.parametrize("fault", [UNSENT, CUT, *(answer(s) for s in (408, 429, 500, 502, 503, 504, 507))])
def test_a_read_survives_what_passes(fault: wire.HttpResponse | BrokenConnectionError) -> None:
    stage = Stage(fault, answer(200))
    assert stage.run(exchange(READ, Backoff(RETRIES))).response.status == 200
    assert len(stage.requests) == 2
    assert len(stage.pauses) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413])
def test_a_refusal_is_final(status: int) -> None:
    stage = Stage(answer(status))
    assert stage.run(exchange(READ, Backoff(RETRIES))).response.status == status
    assert stage.pauses == []


@pytest.mark.parametrize("fault", [UNSENT, answer(429), answer(507)])
def test_an_append_that_cannot_have_happened_is_sent_again(
    fault: wire.HttpResponse | BrokenConnectionError,
) -> None:
    stage = Stage(fault, DONE)
    assert not stage.run(exchange(APPEND, Backoff(RETRIES))).maybe_applied
    assert len(stage.requests) == 2


def test_an_append_cut_off_is_never_sent_again() -> None:
    stage = Stage(CUT)
    with pytest.raises(ClientError, match="may or may not be committed") as caught:
        stage.run(exchange(APPEND, Backoff(RETRIES)))
    assert caught.value.code == "outcome_unknown"
    assert caught.value.outcome_unknown
    assert len(stage.requests) == 1


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_an_append_that_may_have_happened_is_never_sent_again(status: int) -> None:
    body = b'{"error":{"code":"append_timeout","message":"unknown"}}'
    stage = Stage(answer(status, body))
    with pytest.raises(ClientError) as caught:
        stage.run(StreamOperations("s", RETRIES, "text/plain").append(b"x"))
    assert caught.value.outcome_unknown
    assert len(stage.requests) == 1


@pytest.mark.parametrize("status", [400, 404, 409, 413])
def test_a_refused_append_is_not_in_doubt(status: int) -> None:
    with pytest.raises(ClientError) as caught:
        Stage(answer(status)).run(StreamOperations("s", RETRIES, "text/plain").append(b"x"))
    assert not caught.value.outcome_unknown
    assert caught.value.code == f"http_{status}"


def test_closing_is_repeatable_closing_with_content_is_not() -> None:
    stage = Stage(CUT, answer(204, stream_next_offset=OFFSET, stream_closed="true"))
    assert stage.run(StreamOperations("s", RETRIES).close()).closed
    with pytest.raises(ClientError, match="may or may not"):
        Stage(CUT).run(StreamOperations("s", RETRIES, "text/plain").append(b"x", close=True))


@pytest.mark.parametrize("status", [404, 410])
def test_a_delete_whose_answer_was_lost_has_succeeded(status: int) -> None:
    Stage(CUT, answer(status)).run(StreamOperations("s", RETRIES).delete())
    with pytest.raises(ClientError):
        Stage(answer(status)).run(StreamOperations("s", RETRIES).delete())


def test_patience_ends() -> None:
    stage = Stage(*[CUT] * RETRIES.attempts_max)
    with pytest.raises(ClientError) as caught:
        stage.run(exchange(READ, Backoff(RETRIES)))
    assert caught.value.code == "connection_lost"
    assert not caught.value.outcome_unknown
    assert len(stage.pauses) == RETRIES.attempts_max - 1


def test_a_server_never_reached_is_named_as_such() -> None:
    with pytest.raises(ClientError) as caught:
        Stage(*[UNSENT] * RETRIES.attempts_max).run(exchange(APPEND, Backoff(RETRIES)))
    assert caught.value.code == "connect_failed"
    assert not caught.value.outcome_unknown


def test_the_last_answer_is_returned_when_patience_ends() -> None:
    stage = Stage(*[answer(503)] * RETRIES.attempts_max)
    assert stage.run(exchange(READ, Backoff(RETRIES))).response.status == 503


def test_delays_grow_with_jitter_up_to_a_bound() -> None:
    retries = Retries(delay_s_first=1.0, delay_s_max=8.0, attempts_max=100, elapsed_s_max=1e9)
    backoff = Backoff(retries, monotonic=lambda: 0.0)
    delays = [backoff.next_delay() or 0.0 for _ in range(50)]
    ceilings = [1.0, 2.0, 4.0, *[8.0] * 47]
    assert all(ceiling / 2 <= delay <= ceiling for delay, ceiling in zip(delays, ceilings, strict=True))
    assert len(set(delays[4:])) > 20


def test_retry_after_is_a_lower_bound() -> None:
    stage = Stage(answer(429, retry_after="3"), answer(200))
    stage.run(exchange(READ, Backoff(RETRIES)))
    assert stage.pauses[0] >= 3.0


def test_no_use_in_waiting_longer_than_patience_lasts() -> None:
    stage = Stage(answer(503, retry_after="3600"))
    assert stage.run(exchange(READ, Backoff(RETRIES))).response.status == 503
    assert stage.pauses == []


def test_time_runs_from_the_first_failure() -> None:
    now = [0.0]
    backoff = Backoff(Retries(attempts_max=100, elapsed_s_max=10.0), monotonic=lambda: now[0])
    now[0] = 1000.0
    assert backoff.next_delay() is not None
    now[0] = 1011.0
    assert backoff.next_delay() is None
    backoff.reset()
    assert backoff.next_delay() is not None


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("soon", None), ("-1", None)]
)
def test_retry_after_is_a_number_or_a_date(text: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": text}) == seconds
