"""Appends that are a body and nothing else, sent again and again with the same head.

Nearly every append is one. What is the same for all that share a head (the stream's name, the content type,
that nothing special is asked) is worked out once; what may change between two of them is looked at each time.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.commit_path import LogBackpressureError
from tailrace.log.log import Log
from tailrace.log.model import NO_LIFETIME
from tailrace.log.transaction import Transaction
from tailrace.protocol import json_split
from tailrace.protocol.http_headers import is_json
from tailrace.protocol.offsets import next_offset_line
from tailrace.routing import responses
from tailrace.server.waiting_appends import WaitingAppends


class FastAppendHandler:
    """Handles the appends of one head; whatever is not as usual goes the general way."""

    __slots__ = (
        "_content_type",
        "_entries_max",
        "_general",
        "_json",
        "_json_depth",
        "_log",
        "_name",
        "_waiting",
    )

    def __init__(
        self,
        log: Log,
        name: str,
        content_type: str,
        general: Callable[[Exchange], None],
        waiting: WaitingAppends,
    ) -> None:
        self._log = log
        self._json_depth = log.limits.json_depth
        self._entries_max = log.limits.append_entries
        self._name = name
        self._content_type = content_type
        self._json = is_json(content_type)
        self._general = general
        self._waiting = waiting

    def __call__(self, exchange: Exchange) -> None:
        log = self._log
        stream = log.streams.by_name.get(self._name)
        try:
            if (
                stream is None
                or stream.closed
                or stream.gone
                or stream.lifetime is not NO_LIFETIME
                or stream.content_type != self._content_type
                or stream.documents is not None
                or log.on_room is not None  # others wait for room
            ):
                self._general(exchange)
                return
            body = exchange.body
            if not self._json:
                log.append_plain(stream, body, None, _acknowledge_fast_append, exchange)
                return
            joined, lengths = json_split.split_to_block(body, self._json_depth, self._entries_max)
            if len(lengths) == 1:
                log.append_plain(stream, joined, None, _acknowledge_fast_append, exchange)
            elif lengths:
                log.append_plain(stream, joined, lengths, _acknowledge_fast_append, exchange)
            else:
                self._general(exchange)
        except LogBackpressureError as lack:
            self._waiting.add(exchange, self._general, lack)


def _acknowledge_fast_append(transaction: Transaction, error: TailraceError | None) -> None:
    exchange, stream, op = transaction.context, transaction.subject, transaction.append
    assert type(exchange) is Exchange
    assert stream is not None
    assert op is not None
    if error is not None:
        responses.respond_error(exchange, error)
        return
    # What was just written is in the stream's present epoch.
    exchange.acknowledge(next_offset_line(stream.epochs[-1][0], op.first + op.count - 1))
