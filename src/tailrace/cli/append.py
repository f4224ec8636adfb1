"""``tailrace append``: entries from arguments or standard input."""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import RefusedError, UsageError
from tailrace.cli.session import DEFAULT_SESSION, Session, connect_client, print_json

if TYPE_CHECKING:
    from tailrace.client import Client, Stream

_PIECE_BYTES: Final = 1024 * 1024
_LINE_BYTES_MAX: Final = 64 * 1024 * 1024

_HELP: Final = """Append entries to a stream, and return when they are on disk.

Entries come from the arguments, or from standard input when there are none. On a JSON stream every argument
and every input line is one message. On any other stream every argument is one entry, and so is every line
with `--lines`; without it the input is appended unchanged, in pieces of up to 1 MiB. If an entry is
refused, the message says how many were appended before it.

For example:

    tailrace append orders '{"id": 1}' --create

    tailrace append orders < orders.ndjson

    tail -f app.log | tailrace append logs/app --lines --create --content-type text/plain
"""

command = App(name="append", help=_HELP, help_format="markdown")


@command.default
def append(
    name: Annotated[str, Parameter(help="The stream, for example orders or logs/app.")],
    /,
    *data: Annotated[str, Parameter(help="Entries; standard input by default.")],
    create: Annotated[bool, Parameter(negative="", help="Create the stream if it does not exist.")] = False,
    content_type: Annotated[
        str, Parameter(help="Content type of a new stream, or of one that the token cannot read.")
    ] = "application/json",
    key: Annotated[str | None, Parameter(help="Routing key of the entries.")] = None,
    lines: Annotated[bool, Parameter(negative="", help="Every input line is an entry.")] = False,
    producer: Annotated[
        str | None,
        Parameter(help="Producer id, for exactly-once appends when a request is repeated after a failure."),
    ] = None,
    close: Annotated[bool, Parameter(negative="", help="Close the stream afterwards.")] = False,
    session: Session = DEFAULT_SESSION,
) -> None:
    for flag, value in (("--key", key), ("--producer", producer), ("--content-type", content_type)):
        _check(flag, value)
    with connect_client(session) as client:
        stream = _open(client, name, content_type, create=create)
        cut = _Cut(json=_is_json(stream.content_type), lines=lines)
        batches = [[text.encode() for text in data]] if data else cut.batches(sys.stdin.fileno())
        with _progress(name, shown=not data) as advance:
            count, next_offset = _send(stream, cut.checked(batches, advance), key, producer)
        if close:
            next_offset = stream.close().next_offset
    if count == 0 and not close:
        raise RefusedError("no entries to append")
    if session.json:
        print_json({"stream": name, "entries": count, "next_offset": next_offset, "closed": close})
    else:
        print(
            f"appended {count:,} {'entry' if count == 1 else 'entries'} to {name}, next offset {next_offset}"
        )


def _check(flag: str, value: str | None) -> None:
    """An unset shell variable must not look like an absent flag."""
    from tailrace.client import wire

    try:
        wire.header_value(flag, flag if value is None else value)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _open(client: Client, name: str, content_type: str, *, create: bool) -> Stream:
    """A handle with its content type, which decides how the input is split."""
    from tailrace.client import ClientError

    named = client.stream(name, content_type=content_type)
    try:
        return client.stream(name, content_type=named.head().content_type)
    except ClientError as error:
        if error.code not in ("not_found", "forbidden"):
            raise
        if error.code == "not_found" and not create:
            raise RefusedError(f"stream {name!r} not found; pass --create to create it") from None
    try:
        # A write-only token cannot read the content type: use the given one, and if it is wrong the append
        # is refused.
        return client.stream(name, content_type=named.create().content_type) if create else named
    except ClientError as error:
        if error.code != "stream_exists":
            raise
        return named


def _is_json(content_type: str | None) -> bool:
    return content_type is not None and content_type.partition(";")[0].strip().lower() == "application/json"


class _Cut:
    """Splits input into entries. A batch is what one read returned, so slow input is appended at once."""

    def __init__(self, *, json: bool, lines: bool) -> None:
        self.json = json
        self.lines = lines or json

    def batches(self, descriptor: int) -> Iterator[list[bytes]]:
        rest = b""
        while piece := os.read(descriptor, _PIECE_BYTES):
            if not self.lines:
                yield [piece]
                continue
            *complete, rest = (rest + piece).split(b"\n")
            if len(rest) > _LINE_BYTES_MAX:
                raise UsageError(f"a line of the input is longer than {_LINE_BYTES_MAX:,} bytes")
            # On a text stream the line end is part of the entry, so that reading returns what was written.
            yield (
                [line for line in complete if line.strip()]
                if self.json
                else [line + b"\n" for line in complete]
            )
        if rest.strip() or (rest and not self.json):
            yield [rest]

    def checked(
        self, batches: Iterable[list[bytes]], advance: Callable[[list[bytes]], None]
    ) -> Iterator[list[bytes]]:
        """The batches, checked before they are sent, as the server could not name the line."""
        count = 0
        for batch in batches:
            for entry in batch if self.json else ():
                count += 1
                if (fault := _fault_of(entry)) is not None:
                    shown = entry[:40].decode(errors="replace")
                    raise UsageError(f"entry {count} is not JSON: {shown!r} ({fault})")
            yield batch
            advance(batch)


@contextmanager
def _progress(name: str, *, shown: bool) -> Generator[Callable[[list[bytes]], None]]:
    """A bar on the terminal, with a percentage if the input is a file. Call the result after each batch."""
    # The bar would overwrite lines being typed.
    if not shown or not sys.stderr.isatty() or sys.stdin.isatty():
        yield lambda _batch: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[words]}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=_bytes_left(sys.stdin.fileno()), words="")
        entries = 0

        def advance(batch: list[bytes]) -> None:
            nonlocal entries
            entries += len(batch)
            # The line ends of JSON messages are not part of them.
            bar.update(task, advance=sum(map(len, batch)) + len(batch), words=f"{entries:,} entries")

        yield advance


def _bytes_left(descriptor: int) -> int | None:
    """The rest of a file; None for a pipe."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return None
    return max(0, found.st_size - os.lseek(descriptor, 0, os.SEEK_CUR))


def _fault_of(entry: bytes) -> str | None:
    """The error if this is not JSON."""
    import json

    import msgspec

    try:
        msgspec.json.decode(entry, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        try:
            # The server accepts lone surrogates.
            json.loads(entry, parse_constant=_no_number)
        except ValueError:
            return str(error)
    return None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _send(
    stream: Stream, batches: Iterable[list[bytes]], key: str | None, producer: str | None
) -> tuple[int, str | None]:
    """Append all batches; returns the number of entries and the next offset."""
    if producer is not None:
        return _produce(stream, itertools.chain.from_iterable(batches), key, producer)
    from tailrace.client import ClientError

    count, next_offset = 0, None
    try:
        for batch in batches:
            if batch and (result := stream.append_many(batch, key=key)) is not None:
                count, next_offset = count + len(batch), result.next_offset
    except UsageError as error:
        raise UsageError(f"{error}{_after(count)}", appended=count) from None
    except ClientError as error:
        appended = error.extra.get("appended", 0)
        count += appended if isinstance(appended, int) else 0
        error.extra["appended"] = count
        if not error.outcome_unknown:
            error.message += _after(count)
        raise
    return count, next_offset


def _produce(
    stream: Stream, entries: Iterable[bytes], key: str | None, producer: str
) -> tuple[int, str | None]:
    count, last = 0, None
    try:
        with stream.producer(producer) as writer:
            for entry in entries:
                last = writer.append(_one_message(entry, stream), key=key)
                count += 1
    except UsageError as error:
        # Queued entries have been sent by now, unless the producer failed as well.
        if last is not None and last.exception() is not None:
            raise
        raise UsageError(f"{error}{_after(count)}", appended=count) from None
    return count, last.result().next_offset if last else None


def _after(count: int) -> str:
    """Where to continue: sending the corrected input from the start would duplicate its beginning."""
    if not count:
        return ""
    were = "entry was" if count == 1 else "entries were"
    return f"; {count:,} {were} appended before that: continue with entry {count + 1:,}"


def _one_message(entry: bytes, stream: Stream) -> bytes:
    # To a producer a JSON array is a batch; here every line is one message, so an array is wrapped once more.
    is_batch = _is_json(stream.content_type) and entry.lstrip().startswith(b"[")
    return b"[" + entry + b"]" if is_batch else entry
