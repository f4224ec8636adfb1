"""Adoption: installs a first schema or profile on a stream that has entries, after checking all of them.

Entries that exist when the check begins are read page by page. Entries appended during the check are checked
when they are decided, whether or not they are durable yet. So the check ends when the reading does, however
fast the stream grows, and no append can come between its end and the installation. An append is never
rejected for a schema that is not installed yet: it fails the check instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, cast

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange, ResponseStream
from tailrace.log.decide import AppendRequest
from tailrace.log.model import Stream
from tailrace.log.transaction import await_commit
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.schema.json_schema import compile_schema
from tailrace.schema.json_values import UnusableRecordError, decode_json_record, encode_json_record
from tailrace.schema.profiles.profile import Profile
from tailrace.schema.stream_schema import split_append_body

READ_BYTES: Final = 256 * 1024  # payload bytes of one step
CONCURRENT_CHECKS_MAX: Final = 4
PROGRESS_INTERVAL_S: Final = 0.5
NDJSON_TYPE: Final = b"Content-Type: application/x-ndjson\r\n"

Payload = bytes | memoryview
# Returns why a stored payload is invalid; None if it is valid.
EntryCheck = Callable[[Payload], str | None]


class InvalidEntry(NamedTuple):
    """The first invalid entry that was found, and why."""

    entry: int
    reason: str


class AdoptionCandidate:
    """A schema or profile whose entries are being checked; used on the event loop only."""

    def __init__(self, stream: Stream, check: EntryCheck) -> None:
        self.stream = stream
        self.check = check
        self.last_read = stream.tail  # entries up to here are read
        self._seen = stream.tail  # later entries up to here were checked when they were appended
        self.invalid: InvalidEntry | None = None

    def record_append(self, request: AppendRequest) -> None:
        """Check the entries of an append, which is decided as soon as this returns."""
        first = self.stream.tail + 1
        if first > self._seen + 1:
            return  # entries were appended without this check: `verify` rejects
        payloads = split_append_body(request)
        self._seen = first + len(payloads) - 1  # may be less than before after a failed commit
        if self.invalid is None:
            self.record_invalid(first, find_invalid_entry(self.check, payloads))

    def record_invalid(self, first: int, found: tuple[int, str] | None) -> None:
        if found is not None and self.invalid is None:
            self.invalid = InvalidEntry(first + found[0], found[1])

    def verify(self) -> None:
        """Raise unless all entries up to the tail were checked and are valid."""
        stream = self.stream
        if stream.removed or stream.gone:
            raise TailraceError("not_found", "stream was deleted")
        if self.invalid is not None:
            offset = stream.offset(self.invalid.entry)
            raise TailraceError(
                "invalid_request",
                f"entry at offset {offset} does not fit: {self.invalid.reason}; nothing was changed",
                offset=offset,
            )
        if stream.tail > self._seen:
            raise TailraceError("conflict", "stream changed while its entries were checked; retry")


def find_invalid_entry(check: EntryCheck, payloads: Sequence[Payload]) -> tuple[int, str] | None:
    """The index of the first invalid payload, and why it is invalid."""
    for index, payload in enumerate(payloads):
        reason = check(payload)
        if reason is not None:
            return index, reason
    return None


def schema_checker(schema: object) -> EntryCheck:
    """A check of records by a schema."""
    validator = compile_schema(schema)

    def check(payload: Payload) -> str | None:
        try:
            return validator.complaint(decode_json_record(payload))
        except UnusableRecordError as error:
            return f"(root) {error}"

    return check


def profile_checker(profile: Profile) -> EntryCheck:
    """A check that the profile would store the records unchanged if they were appended now."""

    def check(payload: Payload) -> str | None:
        try:
            stored = profile.accept(decode_json_record(payload), 0)
            if not profile.reencodes:
                return None
            field = _differing(
                cast("dict[str, object]", decode_json_record(payload)), cast("dict[str, object]", stored)
            )
        except UnusableRecordError as error:
            return f"(root) {error}"
        except TailraceError as error:
            return error.message
        return (
            None if field is None else f"/{field} is not in the form that the {profile.kind} profile stores"
        )

    return check


def _differing(record: dict[str, object], stored: dict[str, object]) -> str | None:
    """The first member that differs."""
    for name in (*record, *stored):
        if (
            name not in record
            or name not in stored
            or encode_json_record(record[name]) != encode_json_record(stored[name])
        ):
            return name
    return None


def wants_adoption(exchange: Exchange) -> bool:
    requested = parse_query(exchange.query).get("adopt", "false")
    if requested not in ("true", "false"):
        raise TailraceError("invalid_request", "adopt must be true or false")
    return requested == "true"


class AdoptionResponse:
    """The response of a request that may take long: at its end, or as NDJSON with progress if accepted."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._outlet: ResponseStream | None = None
        self._reported_s = 0.0
        self.streamed = b"application/x-ndjson" in exchange.headers.get(b"accept", b"")

    def begin(self, on_gone: Callable[[], object]) -> None:
        """Start the response. `on_gone` is called if the client disconnects."""
        if self.streamed:
            self._outlet = self._exchange.open_stream(200, NDJSON_TYPE + responses.NO_STORE)
            self._outlet.on_gone = lambda: _ignore(on_gone())
        else:
            self._exchange.on_gone = lambda: _ignore(on_gone())

    def progress(self, checked: int, total: int) -> None:
        now_s = time.monotonic()
        if self._outlet is not None and now_s - self._reported_s >= PROGRESS_INTERVAL_S:
            self._reported_s = now_s
            self._outlet.write(b'{"checked":%d,"total":%d}\n' % (checked, total))

    def finish(self, document: bytes) -> None:
        self._exchange.on_gone = None
        if self._outlet is None:
            self._exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, document)
        else:
            self._outlet.write(b'{"result":%b}\n' % document)
            self._outlet.end()

    def fail(self, error: TailraceError) -> None:
        self._exchange.on_gone = None
        if self._outlet is None:
            responses.respond_error(self._exchange, error)
        else:
            _status, _head, body = self._exchange.connection.server.app.refuse(self._exchange, error)
            self._outlet.write(body + b"\n")
            self._outlet.end()


def _ignore(_: object) -> None:
    """Discard the result of a callback."""


class Adoptions:
    """The running checks: at most one for each stream, and few in all."""

    def __init__(self, context: Context, candidates: dict[int, AdoptionCandidate]) -> None:
        """`candidates` by stream number are shared with the validator of appends."""
        self._context = context
        self._log = context.log
        self._candidates = candidates
        self._thread = ThreadPoolExecutor(1, "adoption")
        self._stopping = False

    def end_all(self) -> None:
        """Shutdown: running checks fail, and nothing is changed."""
        self._stopping = True

    async def adopt(
        self, stream: Stream, check: EntryCheck, response: AdoptionResponse, decide: Callable[[], None]
    ) -> None:
        """Check all entries, then call `decide` in the same step. Raises if an entry is invalid.

        If the log has no room `decide` is called again later; entries appended meanwhile are checked too.
        """
        if stream.number in self._candidates:
            raise TailraceError("conflict", "entries of this stream are being checked already")
        if len(self._candidates) >= CONCURRENT_CHECKS_MAX:
            raise TailraceError(
                "overloaded", f"{CONCURRENT_CHECKS_MAX} streams are being checked; try again later"
            )
        task = asyncio.current_task()
        assert task is not None
        response.begin(task.cancel)
        limits = self._context.limits
        limit_ms = limits.adopt_ms if response.streamed else limits.request_ms
        candidate = self._candidates[stream.number] = AdoptionCandidate(stream, check)
        # Appends to a stream without documents are not validated, and an idle stream may be evicted.
        stream.documents = stream.documents or {}
        stream.live += 1
        try:
            async with asyncio.timeout(limit_ms / 1000):
                await await_commit(lambda reply: self._log.settled(stream, reply))
                await self._read(candidate, response)

            def install() -> None:
                candidate.verify()
                decide()

            await self._log.backpressure_queue.submit(install)
        except TimeoutError:
            raise _adoption_timeout(limit_ms, streamed=response.streamed) from None
        finally:
            del self._candidates[stream.number]
            stream.documents = stream.documents or None
            stream.live -= 1
            self._log.touch(stream)

    async def _read(self, candidate: AdoptionCandidate, response: AdoptionResponse) -> None:
        """Read and check entries up to the first invalid one, whether it was read or appended."""
        stream, last = candidate.stream, candidate.last_read
        begin = after = stream.earliest
        while after < last and candidate.invalid is None and not stream.removed:
            if self._stopping:
                raise TailraceError("unavailable", "server is stopping; nothing was changed")
            response.progress(after - begin, last - begin)
            try:
                page = await self._log.reader.read(stream, after, READ_BYTES, last - after, apart=True)
            except TailraceError as error:
                if error.code != "offset_gone" or stream.earliest <= after:
                    raise
                after = min(stream.earliest, last)  # removed by retention
                continue
            if page.next_entry <= after:
                raise TailraceError("conflict", "stream changed while its entries were checked; retry")
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, find_invalid_entry, candidate.check, page.parts
            )
            candidate.record_invalid(after + 1, found)
            after = page.next_entry


def _adoption_timeout(limit_ms: int, *, streamed: bool) -> TailraceError:
    message = f"entries could not be checked in {limit_ms} ms; nothing was changed"
    if not streamed:
        message += "; with Accept: application/x-ndjson the check may take longer and reports its progress"
    return TailraceError("request_timeout", message)
