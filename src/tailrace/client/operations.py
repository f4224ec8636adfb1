"""The operations of the stream client, as steps that the sync and the async client run.

`methods.py` makes the methods of both clients from them, with these signatures and docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeVar, Unpack

from tailrace.client import model, wire
from tailrace.client.errors import ClientError, check_integer
from tailrace.client.follow import Follower, Mode
from tailrace.client.model import AppendResult, Page, StreamDescriptor, StreamInfo
from tailrace.client.transport import (
    Backoff,
    ExchangeResult,
    Items,
    ItemSteps,
    Retries,
    Steps,
    exchange,
    with_stream_name,
)

# `append_many` splits its requests here: far below the server's 64 MiB, but large enough to make them rare.
BATCH_BYTES_MAX = 1024 * 1024
BATCH_COUNT_MAX = 10_000

_NOTHING = object()

T = TypeVar("T")


class StreamOperations:
    """The operations on one stream. Remembers its content type, once known, for appends."""

    __slots__ = ("content_type", "name", "retries")

    def __init__(self, name: str, retries: Retries, content_type: str | None = None) -> None:
        wire.stream_path(name)
        if content_type is not None:
            wire.header_value("Content-Type", content_type)
        self.name = name
        self.retries = retries
        self.content_type = content_type

    def _exchange(self, request: wire.HttpRequest) -> Steps[ExchangeResult]:
        return exchange(request, Backoff(self.retries))

    def create(
        self,
        *,
        content_type: str | None = None,
        closed: bool = False,
        body: model.Data = None,
        **lifetime: Unpack[wire.Lifetime],
    ) -> Steps[StreamInfo]:
        """Create the stream, or confirm that it exists with this configuration (`created` is False then)."""
        return self.put(content_type, lifetime, closed=closed, body=body)

    @with_stream_name
    def fork(
        self,
        target: str,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        closed: bool = False,
        body: model.Data = None,
        **lifetime: Unpack[wire.Lifetime],
    ) -> Steps[StreamOperations]:
        """Create `target` as a stream that begins with this one up to `offset` (by default, all of it)."""
        fork = wire.ForkPoint(source=self.name, offset=offset, sub_offset=sub_offset)
        operations = StreamOperations(target, self.retries)
        content_type = None if body is None else self.content_type
        yield from operations.put(content_type, lifetime, closed=closed, body=body, fork=fork)
        return operations

    @with_stream_name
    def put(
        self,
        content_type: str | None,
        lifetime: wire.Lifetime,
        *,
        closed: bool,
        body: model.Data,
        fork: wire.ForkPoint | None = None,
    ) -> Steps[StreamInfo]:
        """Create the stream, empty or as a fork."""
        content_type = content_type or self.content_type
        payload = b""
        if body is not None:
            content_type = content_type or model.implied_type(body)
            payload = model.encode_body(body, content_type or wire.OCTETS_TYPE)
        request = wire.create(
            self.name, content_type=content_type, lifetime=lifetime, closed=closed, body=payload, fork=fork
        )
        outcome = yield from self._exchange(request)
        wire.check_status(outcome.response, 200, 201)
        info = wire.parse_info(self.name, outcome.response)
        if content_type is not None or fork is not None:
            # A stream created without a type gets that of its first append: nothing to remember yet.
            self.content_type = info.content_type
        return info

    @with_stream_name
    def head(self) -> Steps[StreamInfo]:
        """The configuration and the tail of the stream."""
        outcome = yield from self._exchange(wire.head(self.name))
        wire.check_head(self.name, outcome.response)
        return wire.parse_info(self.name, outcome.response)

    @with_stream_name
    def delete(self) -> Steps[None]:
        """Delete the stream with its content."""
        outcome = yield from self._exchange(wire.delete(self.name))
        if outcome.maybe_applied and outcome.response.status in (404, 410):
            # An earlier attempt whose response was lost has deleted it.
            return
        wire.check_status(outcome.response, 200, 204)

    @with_stream_name
    def append(
        self,
        data: model.Data,
        *,
        key: str | None = None,
        seq: str | None = None,
        timestamp: wire.Time | None = None,
        close: bool = False,
    ) -> Steps[AppendResult]:
        """Append; on a JSON stream a list is a batch. Returns after the commit.

        An append with an unknown outcome is not sent again: the error has `outcome_unknown` set.
        """
        content_type = yield from self.type_for(data)
        body = model.encode_body(data, content_type)
        return (
            yield from self._append(
                body, content_type=content_type, key=key, seq=seq, timestamp=timestamp, close=close
            )
        )

    @with_stream_name
    def close(self) -> Steps[AppendResult]:
        """Close the stream permanently. Closing it again is allowed."""
        return (yield from self._append(b"", content_type=None, close=True))

    @with_stream_name
    def append_many(
        self,
        items: Iterable[model.Data],
        *,
        key: str | None = None,
        timestamp: wire.Time | None = None,
    ) -> Steps[AppendResult | None]:
        """Append several items, in as few requests as possible on a JSON stream.

        Returns the result of the last request, None without items. An error has in `extra["appended"]` how
        many items had been committed before it; an error of the iterable itself has it in a note.
        """
        result: AppendResult | None = None
        appended = 0
        items = iter(items)
        first = next(items, _NOTHING)
        if first is _NOTHING:
            return None
        content_type = yield from self.type_for(first)
        groups = model.group_parts(
            chain([first], items), content_type, bytes_max=BATCH_BYTES_MAX, count_max=BATCH_COUNT_MAX
        )
        try:
            for group in groups:
                body = model.join_parts(group, content_type)
                result = yield from self._append(
                    body, content_type=content_type, key=key, timestamp=timestamp
                )
                appended += len(group)
        except ClientError as error:
            error.extra["appended"] = appended
            raise
        except Exception as error:  # of the caller's own iterable
            error.add_note(f"{appended:,} items were appended before this")
            raise
        return result

    def _append(
        self,
        body: bytes,
        *,
        content_type: str | None,
        key: str | None = None,
        seq: str | None = None,
        timestamp: wire.Time | None = None,
        close: bool = False,
    ) -> Steps[AppendResult]:
        request = wire.append(
            self.name, body, content_type=content_type, key=key, seq=seq, timestamp=timestamp, close=close
        )
        outcome = yield from self._exchange(request)
        wire.check_status(outcome.response, 200, 204, repeatable=request.repeatable)
        if content_type is not None:
            self.content_type = content_type
        return wire.parse_append(outcome.response)

    def type_for(self, data: model.Data) -> Steps[str]:
        """The content type to append this data with; requests it from the server if it is unknown."""
        if self.content_type is not None:
            return self.content_type
        implied = model.implied_type(data)
        if implied is not None:
            return implied
        info = yield from self.head()
        self.content_type = info.content_type
        return info.content_type

    @with_stream_name
    def read(self, offset: str | None = None, **options: Unpack[wire.ReadOptions]) -> Steps[Page]:
        """One page from the offset on; without an offset from the start.

        `key` selects entries by routing key, `since` those from a time on, `filter` those that match.
        """
        outcome = yield from self._exchange(wire.read(self.name, offset=offset, **options))
        wire.check_status(outcome.response, 200)
        return wire.parse_page(outcome.response)

    def pages(self, offset: str | None = None, **options: Unpack[wire.ReadOptions]) -> ItemSteps[Page]:
        """The pages with content up to the tail."""
        return self._pages(offset, options, lambda page: (page,))

    def entries(self, offset: str | None = None, **options: Unpack[wire.ReadOptions]) -> ItemSteps[Any]:
        """The decoded messages up to the tail; on a byte stream, the bytes of each page."""
        return self._pages(offset, options, lambda page: page.entries)

    def _pages(
        self, offset: str | None, options: wire.ReadOptions, items_of: Callable[[Page], Iterable[T]]
    ) -> ItemSteps[T]:
        while True:
            page = yield from self.read(offset, **options)
            if not page.is_empty:
                yield Items(items_of(page))
            if page.up_to_date:
                return
            offset, options = page.next_offset, wire.continued_options(options)

    def follow(
        self,
        offset: str = "-1",
        *,
        mode: Mode = "long-poll",
        give_up_s: float | None = None,
        **options: Unpack[wire.ReadOptions],
    ) -> Follower:
        """Live pages, until the stream is closed.

        `offset` is `-1` (the start), `now`, or the `next_offset` of the last processed page. Broken
        connections are resumed, with `give_up_s` only for that long. Nothing is sent before the first page is
        requested. A `filter` requires the mode `long-poll`.
        """
        return Follower(
            self.name, offset=offset, mode=mode, options=options, give_up_s=give_up_s, retries=self.retries
        )


class ServerOperations:
    """The operations of a server that do not concern one stream."""

    __slots__ = ("retries",)

    def __init__(self, retries: Retries) -> None:
        self.retries = retries

    def streams(
        self, prefix: str = "", *, after: str = "", page_size: int = 100, system: bool = False
    ) -> ItemSteps[StreamDescriptor]:
        """All streams whose name starts with the prefix, in byte order, page by page as needed."""
        check_integer("page_size", page_size, least=1)
        more = True
        while more:
            request = wire.list_streams(prefix=prefix, after=after, limit=page_size, system=system)
            outcome = yield from exchange(request, Backoff(self.retries))
            wire.check_status(outcome.response, 200)
            rows, more = wire.parse_list(outcome.response)
            if not rows:
                return
            yield Items(rows)
            after = rows[-1].name
