"""Operations on a stream, as steps that the sync and the async client run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Unpack

from tailrace.client import model, wire
from tailrace.client.errors import ClientError, check_integer
from tailrace.client.model import AppendResult, Page, StreamDescriptor, StreamInfo
from tailrace.client.transport import Backoff, ExchangeResult, Retries, Steps, exchange, with_stream_name

# `append_many` splits its requests here: far below the server's 64 MiB, but large enough to make them rare.
BATCH_BYTES_MAX = 1024 * 1024
BATCH_COUNT_MAX = 10_000

_NOTHING = object()


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

    @with_stream_name
    def create(
        self,
        *,
        content_type: str | None,
        lifetime: wire.Lifetime,
        closed: bool,
        body: model.Data,
        key: str | None = None,
        timestamp: wire.Time | None = None,
        fork: wire.ForkPoint | None = None,
    ) -> Steps[StreamInfo]:
        content_type = content_type or self.content_type
        payload = b""
        if body is not None:
            content_type = content_type or model.implied_type(body)
            payload = model.encode_body(body, content_type or wire.OCTETS_TYPE)
        request = wire.create(
            self.name,
            content_type=content_type,
            lifetime=lifetime,
            closed=closed,
            body=payload,
            key=key,
            timestamp=timestamp,
            fork=fork,
        )
        outcome = yield from self._exchange(request)
        wire.check_status(outcome.response, 200, 201)
        info = wire.parse_info(self.name, outcome.response)
        if content_type is not None or fork is not None:
            # A stream created without a type gets that of its first append: nothing to remember yet.
            self.content_type = info.content_type
        return info

    @with_stream_name
    def fork(
        self,
        target: str,
        *,
        offset: str | None,
        sub_offset: int | None,
        closed: bool,
        body: model.Data,
        lifetime: wire.Lifetime,
    ) -> Steps[StreamOperations]:
        """Create the target; returns its operations."""
        operations = StreamOperations(target, self.retries)
        yield from operations.create(
            content_type=None if body is None else self.content_type,
            lifetime=lifetime,
            closed=closed,
            body=body,
            fork=wire.ForkPoint(source=self.name, offset=offset, sub_offset=sub_offset),
        )
        return operations

    @with_stream_name
    def head(self) -> Steps[StreamInfo]:
        outcome = yield from self._exchange(wire.head(self.name))
        wire.check_head(self.name, outcome.response)
        return wire.parse_info(self.name, outcome.response)

    @with_stream_name
    def delete(self) -> Steps[None]:
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
        content_type = yield from self.type_for(data)
        body = model.encode_body(data, content_type)
        return (
            yield from self._append(
                body, content_type=content_type, key=key, seq=seq, timestamp=timestamp, close=close
            )
        )

    @with_stream_name
    def close(self) -> Steps[AppendResult]:
        return (yield from self._append(b"", content_type=None, close=True))

    @with_stream_name
    def append_many(
        self,
        items: Iterable[model.Data],
        *,
        key: str | None = None,
        timestamp: wire.Time | None = None,
    ) -> Steps[AppendResult | None]:
        """Append several items in as few requests as possible; the result of the last one, None if no items.

        An error has in `extra["appended"]` how many items had been committed before it; an error of the
        iterable itself has it in a note.
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
    def read(self, *, offset: str | None, **options: Unpack[wire.ReadOptions]) -> Steps[Page]:
        outcome = yield from self._exchange(wire.read(self.name, offset=offset, **options))
        wire.check_status(outcome.response, 200)
        return wire.parse_page(outcome.response)


class PageReader:
    """Pages from a position up to the tail, one `advance` each."""

    __slots__ = ("_done", "_offset", "_operations", "_options")

    def __init__(
        self, operations: StreamOperations, *, offset: str | None, options: wire.ReadOptions
    ) -> None:
        self._operations = operations
        self._offset = offset
        self._options = options
        self._done = False

    def advance(self) -> Steps[Page | None]:
        """The next page, or None when the tail has been reached."""
        while not self._done:
            page = yield from self._operations.read(offset=self._offset, **self._options)
            self._offset = page.next_offset
            self._options = wire.continued_options(self._options)
            self._done = page.up_to_date
            if not page.is_empty:
                return page
        return None


class StreamLister:
    """The list of streams, one page of names per `advance`."""

    __slots__ = ("_after", "_done", "_limit", "_prefix", "_retries", "_system")

    def __init__(self, retries: Retries, *, prefix: str, after: str, limit: int, system: bool) -> None:
        check_integer("page_size", limit, least=1)
        self._retries = retries
        self._prefix = prefix
        self._after = after
        self._limit = limit
        self._system = system
        self._done = False

    def advance(self) -> Steps[list[StreamDescriptor] | None]:
        if self._done:
            return None
        request = wire.list_streams(
            prefix=self._prefix, after=self._after, limit=self._limit, system=self._system
        )
        outcome = yield from exchange(request, Backoff(self._retries))
        wire.check_status(outcome.response, 200)
        rows, more = wire.parse_list(outcome.response)
        self._done = not more or not rows
        if rows:
            self._after = rows[-1].name
        return rows
