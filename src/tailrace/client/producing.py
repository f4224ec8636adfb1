"""The idempotent producer: every batch takes effect exactly once, however often it has to be sent.

One batch is on its way at a time, with the next sequence number; its retries carry the same number, so the
server can tell them from new batches. The epoch tells incarnations of one producer id apart.
"""

from __future__ import annotations

import secrets
from typing import TypedDict

from tailrace.client import encode, wire
from tailrace.client.arguments import INTEGER_MAX, check_integer, check_seconds, check_text
from tailrace.client.batching import BatchLimits
from tailrace.client.error import OUTCOME_UNKNOWN, PRODUCER_CONFLICT, ClientError, error_from
from tailrace.client.follow import ATTEMPTS_UNLIMITED
from tailrace.client.model import AppendResult, is_json
from tailrace.client.operations import StreamOperations
from tailrace.client.retry import Backoff
from tailrace.client.steps import ExchangeResult, Steps, exchange, with_stream_name

SEQ_MAX = INTEGER_MAX
PRODUCER_ID_BYTES_MAX = 256


class ProducerOptions(BatchLimits, frozen=True, kw_only=True):
    """Who a producer is and how patient. `delivery_s_max` bounds the retries of one batch."""

    producer_id: str | None = None
    epoch: int = 0
    auto_claim: bool = True
    delivery_s_max: float = 120.0

    def __post_init__(self) -> None:
        BatchLimits.__post_init__(self)
        check_integer("epoch", self.epoch)
        check_seconds("delivery_s_max", self.delivery_s_max)
        if self.producer_id is not None:
            check_text("producer_id", self.producer_id, PRODUCER_ID_BYTES_MAX)


class ProducerTuning(TypedDict, total=False):
    """The optional arguments of `producer`; `ProducerOptions` has their defaults."""

    auto_claim: bool
    delivery_s_max: float
    batch_bytes_max: int
    batch_count_max: int
    linger_s: float
    inflight_bytes_max: int


class BatchSequencer:
    """Epoch and sequence number of one producer on one stream, and how a batch is delivered with them."""

    __slots__ = ("_auto_claim", "_claimed", "_delivery_s_max", "_operations", "epoch", "producer_id", "seq")

    def __init__(self, operations: StreamOperations, options: ProducerOptions) -> None:
        self._operations = operations
        self.producer_id = options.producer_id or f"py-{secrets.token_hex(12)}"
        wire.header_value("Producer-Id", self.producer_id)
        self.epoch = options.epoch
        self.seq = 0
        self._delivery_s_max = options.delivery_s_max
        self._auto_claim = options.auto_claim
        # A made-up id has no history, and who refuses to claim has to know the epoch: no need to ask.
        self._claimed = options.producer_id is None or not options.auto_claim

    @with_stream_name
    def content_type_for(self, data: encode.Data) -> Steps[str]:
        content_type = yield from self._operations.type_for(data)
        self._operations.content_type = content_type
        return content_type

    @property
    def name(self) -> str:
        """Of the stream."""
        return self._operations.name

    @with_stream_name
    def deliver(self, parts: list[bytes], key: str | None, *, close: bool = False) -> Steps[AppendResult]:
        """Commit one batch, exactly once; with `close` it is the last one of the stream, and may be empty."""
        content_type = self._operations.content_type
        if content_type is None:
            assert not parts, "the type is known before the first part is queued"
            content_type = yield from self.content_type_for(b"")
        if not self._claimed:
            yield from self._claim(content_type)
        body = encode.join_parts(parts, content_type) if parts else b""
        while True:
            outcome = yield from self._send(body, content_type if parts else None, key, self.seq, close=close)
            answer = outcome.answer
            if answer.status == 403 and self._may_claim(outcome) and (epoch := _epoch(answer)) is not None:
                self.epoch = epoch + 1
                continue
            result = wire.parse_append(answer) if answer.status in (200, 204) else None
            # To a close without content 204 is the plain success, and the stream is closed then.
            is_closed = not parts and result is not None and result.closed
            if answer.status == 204 and not is_closed and (not parts or self._is_foreign(outcome)):
                # Somebody else wrote under this number: nothing of ours has been stored.
                if self._may_claim(outcome):
                    self.epoch += 1
                    continue
                raise self._conflict(outcome)
            if result is None:
                raise error_from(answer.status, answer.headers, answer.body, unknown=outcome.doubtful)
            self.seq += 1
            return AppendResult(next_offset=result.next_offset, closed=True) if is_closed else result

    def _send(
        self, body: bytes, content_type: str | None, key: str | None, seq: int, *, close: bool = False
    ) -> Steps[ExchangeResult]:
        producing = wire.ProducerFields(self.producer_id, self.epoch, seq)
        request = wire.append(
            self.name, body, content_type=content_type, key=key, producing=producing, close=close
        )
        backoff = Backoff(
            self._operations.retries, attempts_max=ATTEMPTS_UNLIMITED, elapsed_s_max=self._delivery_s_max
        )
        return (yield from exchange(request, backoff))

    def _claim(self, content_type: str) -> Steps[None]:
        """Find an epoch that nobody has used, before any data is sent.

        An append with a sequence number out of reach is always refused, and the refusal tells the state of
        this producer id. Sending the first batch on the off chance would not do: to a producer with a
        history in the same epoch, (epoch, 0) is a duplicate, and the batch would be dropped with a success.
        """
        probe = b"0" if is_json(content_type) else b"\0"
        answer = (yield from self._send(probe, content_type, None, SEQ_MAX)).answer
        error = error_from(answer.status, answer.headers, answer.body)
        if answer.status == 403 and (epoch := _epoch(answer)) is not None:
            self.epoch = epoch + 1
        elif answer.status == 409 and (expected := answer.headers.get("producer-expected-seq")) is not None:
            # 0: unknown to this stream. More: there is a history in this very epoch.
            self.epoch += 1 if expected != "0" else 0
        elif not (answer.status == 400 and error.code in ("invalid_header", "http_400")):
            # 400 says that the epoch is newer than the known one, and has to begin at 0: as it will.
            raise error
        self._claimed = True

    def _may_claim(self, outcome: ExchangeResult) -> bool:
        # Only before anything was written in this epoch, and only if nothing of ours can be stored already.
        # Later, a newer epoch means that this producer has been replaced, and it must not fight back.
        return self._auto_claim and self.seq == 0 and not outcome.doubtful

    def _is_foreign(self, outcome: ExchangeResult) -> bool:
        """Whether a duplicate cannot be a retry of ours."""
        highest = outcome.answer.headers.get("producer-seq")
        return not outcome.doubtful or (highest is not None and highest != str(self.seq))

    def _conflict(self, outcome: ExchangeResult) -> ClientError:
        return ClientError(
            OUTCOME_UNKNOWN if outcome.doubtful else PRODUCER_CONFLICT,
            f"another writer uses producer id {self.producer_id!r} in epoch {self.epoch}",
            status=outcome.answer.status,
            headers=outcome.answer.headers,
            outcome_unknown=outcome.doubtful,
        )


def _epoch(answer: wire.HttpResponse) -> int | None:
    return wire.parse_number(answer.headers.get("producer-epoch"))


def check_parts(parts: list[bytes], key: str | None) -> None:
    """What would end the producer when its batch is sent is refused when it is queued."""
    if not parts:
        raise ValueError("an empty list appends nothing")
    if key is not None:
        wire.header_value("Stream-Key", key)
