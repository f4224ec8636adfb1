"""A first schema or profile for a stream that has entries: all of them are checked, then it holds for all.

Entries that were there when the check began are read, page by page, from wherever they are. Entries that are
appended meanwhile are checked when they are decided, whether or not they are durable yet. So the check ends
when the reading does, however fast a stream grows, and nothing comes between its end and the installation.
An append is never refused for a schema that is not installed: it fails the check.
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

READ_BYTES: Final = 256 * 1024  # of payload between two looks at the time
CONCURRENT_CHECKS_MAX: Final = 4
PROGRESS_INTERVAL_S: Final = 0.5
NDJSON_TYPE: Final = b"Content-Type: application/x-ndjson\r\n"

Payload = bytes | memoryview
# What is wrong with a stored payload; None if it fits.
EntryCheck = Callable[[Payload], str | None]


class InvalidEntry(NamedTuple):
    """The first entry that was found not to fit, and why."""

    entry: int
    reason: str


class AdoptionCandidate:
    """What a stream is to be given, while its entries are checked. Owned by the loop thread."""

    def __init__(self, stream: Stream, check: EntryCheck) -> None:
        self.stream = stream
        self.check = check
        self.last_read = stream.tail  # entries up to here are read
        self._seen = stream.tail  # entries up to here, behind those, were seen when they were appended
        self.misfit: InvalidEntry | None = None

    def see(self, request: AppendRequest) -> None:
        """The entries of an append, which is decided as soon as this returns."""
        first = self.stream.tail + 1
        if first > self._seen + 1:
            return  # some came another way: `verify` finds out
        payloads = split_append_body(request)
        self._seen = first + len(payloads) - 1  # a commit that failed may have taken some back
        if self.misfit is None:
            self.note(first, find_invalid_entry(self.check, payloads))

    def note(self, first: int, found: tuple[int, str] | None) -> None:
        if found is not None and self.misfit is None:
            self.misfit = InvalidEntry(first + found[0], found[1])

    def verify(self) -> None:
        """Refuses, unless everything up to the tail was looked at and fits."""
        stream = self.stream
        if stream.removed or stream.gone:
            raise TailraceError("not_found", "the stream was deleted")
        if self.misfit is not None:
            offset = stream.offset(self.misfit.entry)
            raise TailraceError(
                "invalid_request",
                f"the entry at offset {offset} does not fit: {self.misfit.reason}; nothing was changed",
                offset=offset,
            )
        if stream.tail > self._seen:
            raise TailraceError("conflict", "the stream changed while its entries were checked; try again")


def find_invalid_entry(check: EntryCheck, payloads: Sequence[Payload]) -> tuple[int, str] | None:
    """The first payload that does not fit, by its index."""
    for index, payload in enumerate(payloads):
        reason = check(payload)
        if reason is not None:
            return index, reason
    return None


def schema_checker(schema: object) -> EntryCheck:
    """Whether records are valid under a schema."""
    validator = compile_schema(schema)

    def check(payload: Payload) -> str | None:
        try:
            return validator.complaint(decode_json_record(payload))
        except UnusableRecordError as error:
            return f"(root) {error}"

    return check


def profile_checker(profile: Profile) -> EntryCheck:
    """Whether records are what the profile would store if they were appended now: they stay as they are."""

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
        except TailraceError as refusal:
            return refusal.message
        return (
            None if field is None else f"/{field} is not in the form that the {profile.kind} profile stores"
        )

    return check


def _differing(given: dict[str, object], stored: dict[str, object]) -> str | None:
    """The first member that is not the same in both."""
    for name in (*given, *stored):
        if (
            name not in given
            or name not in stored
            or encode_json_record(given[name]) != encode_json_record(stored[name])
        ):
            return name
    return None


def wants_adoption(exchange: Exchange) -> bool:
    asked = parse_query(exchange.query).get("adopt", "false")
    if asked not in ("true", "false"):
        raise TailraceError("invalid_request", "adopt must be true or false")
    return asked == "true"


class AdoptionResponse:
    """How a request is answered that may take long: at its end, or line by line if its client wants that."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._outlet: ResponseStream | None = None
        self._told_s = 0.0
        self.streamed = b"application/x-ndjson" in exchange.headers.get(b"accept", b"")

    def begin(self, on_gone: Callable[[], object]) -> None:
        """The check begins. A client that leaves ends it."""
        if self.streamed:
            self._outlet = self._exchange.open_stream(200, NDJSON_TYPE + responses.NO_STORE)
            self._outlet.on_gone = lambda: _ignore(on_gone())
        else:
            self._exchange.on_gone = lambda: _ignore(on_gone())

    def progress(self, checked: int, total: int) -> None:
        now_s = time.monotonic()
        if self._outlet is not None and now_s - self._told_s >= PROGRESS_INTERVAL_S:
            self._told_s = now_s
            self._outlet.write(b'{"checked":%d,"total":%d}\n' % (checked, total))

    def finish(self, document: bytes) -> None:
        self._exchange.on_gone = None
        if self._outlet is None:
            self._exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, document)
        else:
            self._outlet.write(b'{"result":%b}\n' % document)
            self._outlet.end()

    def refuse(self, error: TailraceError) -> None:
        self._exchange.on_gone = None
        if self._outlet is None:
            responses.respond_error(self._exchange, error)
        else:
            _status, _head, body = self._exchange.connection.server.app.refuse(self._exchange, error)
            self._outlet.write(body + b"\n")
            self._outlet.end()


def _ignore(_: object) -> None:
    """What a callback gives back is of no use to its caller."""


class Adoptions:
    """The checks that are under way: one of a stream, and few in all."""

    def __init__(self, context: Context, candidates: dict[int, AdoptionCandidate]) -> None:
        """`candidates` by the number of their stream are asked by the sequencer."""
        self._context = context
        self._log = context.log
        self._candidates = candidates
        self._thread = ThreadPoolExecutor(1, "adoption")
        self._stopping = False

    def end_all(self) -> None:
        """Shutdown: no check is finished, and nothing is changed."""
        self._stopping = True

    async def adopt(
        self, stream: Stream, check: EntryCheck, answer: AdoptionResponse, decide: Callable[[], None]
    ) -> None:
        """Checks every entry, then calls `decide` in the same step. Raises if some entry does not fit."""
        if stream.number in self._candidates:
            raise TailraceError("conflict", "entries of this stream are being checked already")
        if len(self._candidates) >= CONCURRENT_CHECKS_MAX:
            raise TailraceError(
                "overloaded", f"{CONCURRENT_CHECKS_MAX} streams are being checked; try again later"
            )
        task = asyncio.current_task()
        assert task is not None
        answer.begin(task.cancel)
        limits = self._context.limits
        limit_ms = limits.adopt_ms if answer.streamed else limits.request_ms
        candidate = self._candidates[stream.number] = AdoptionCandidate(stream, check)
        # Appends to a stream without documents are not looked at, and an idle one may leave memory.
        stream.documents = stream.documents or {}
        stream.live += 1
        try:
            async with asyncio.timeout(limit_ms / 1000):
                await await_commit(lambda reply: self._log.settled(stream, reply))
                await self._read(candidate, answer)
            candidate.verify()
            decide()
        except TimeoutError:
            raise _adoption_timeout(limit_ms, streamed=answer.streamed) from None
        finally:
            del self._candidates[stream.number]
            stream.documents = stream.documents or None
            stream.live -= 1
            self._log.touch(stream)

    async def _read(self, candidate: AdoptionCandidate, answer: AdoptionResponse) -> None:
        """Stops at the first entry that does not fit, whether it was read or appended."""
        stream, last = candidate.stream, candidate.last_read
        begin = after = stream.earliest
        while after < last and candidate.misfit is None and not stream.removed:
            if self._stopping:
                raise TailraceError("unavailable", "the server stops; nothing was changed")
            answer.progress(after - begin, last - begin)
            try:
                page = await self._log.reader.read(stream, after, READ_BYTES, last - after, apart=True)
            except TailraceError as refusal:
                if refusal.code != "offset_gone" or stream.earliest <= after:
                    raise
                after = min(stream.earliest, last)  # retention was faster
                continue
            if page.next_entry <= after:
                raise TailraceError(
                    "conflict", "the stream changed while its entries were checked; try again"
                )
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, find_invalid_entry, candidate.check, page.parts
            )
            candidate.note(after + 1, found)
            after = page.next_entry


def _adoption_timeout(limit_ms: int, *, streamed: bool) -> TailraceError:
    message = f"the entries could not be checked in {limit_ms} ms; nothing was changed"
    if not streamed:
        message += "; with Accept: application/x-ndjson the check may take longer and tells its progress"
    return TailraceError("request_timeout", message)
