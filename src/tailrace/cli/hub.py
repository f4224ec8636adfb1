"""``tailrace hub``: actors, messages, mailboxes and dead letters."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from tailrace.cli.errors import OK, REFUSED, UsageError, report_error, unreachable
from tailrace.cli.options import parse_past_time
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    authorization_header,
    connect_client,
    flush_output,
    print_empty,
    print_json,
    write_output,
)
from tailrace.cli.tables import Column, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.client.hub import Actor, Hub, Message


DEAD_LETTERS: Final = "hub/dead-letters"
_PAGE: Final = 100

Limit = Annotated[int | None, Parameter(help="Maximum number.")]


def mailbox(
    address: Annotated[str, Parameter(help="The owner of the mailbox.")],
    /,
    *,
    offset: Annotated[
        str, Parameter(help="Where to start: committed, -1 (the start), or an offset.")
    ] = "committed",
    limit: Limit = _PAGE,
    commit: Annotated[str | None, Parameter(help="Commit everything up to this offset as processed.")] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Show the messages in a mailbox, without committing them unless --commit is given."""

    # Not under the address itself, which would close the connection of its owner.
    with join_hub(session) as hub:
        if commit is not None:
            hub.commit_offset(commit, address=address)
        page = hub.read_mailbox(address, offset=offset, limit=limit or _PAGE)
    for entry in page.messages:
        message: dict[str, Any] = entry.message
        if session.json:
            print_json({"offset": entry.offset, "append_time": entry.append_time, "message": message})
        else:
            print(entry.offset, message.get("from"), message.get("type"), _json(message.get("payload")))
    flush_output()
    if session.json:
        return
    if page.lag is None:
        print_empty(f"mailbox of {address}")
    else:
        sys.stderr.write(f"{page.lag} uncommitted; committed {page.committed}\n")


def dead_letters(
    *,
    to: Annotated[str | None, Parameter(help="Only those for this address.")] = None,
    reason: Annotated[str | None, Parameter(help="Only those with this reason.")] = None,
    since: Annotated[
        str | None,
        Parameter(help="Only those since this time (RFC 3339), or of the last 15m, 1h or 7d."),
    ] = None,
    limit: Limit = None,
    replay: Annotated[bool, Parameter(negative="", help="Send them again instead of listing them.")] = False,
    session: Session = DEFAULT_SESSION,
) -> int:
    """List messages that could not be delivered, and why; or send them again."""
    since = None if since is None else parse_past_time(since, "--since")
    found = _limited(_letters(session, to, reason, since), limit)
    if not replay:
        shown = 0
        for _id, letter in found:
            shown += 1
            if session.json:
                print_json(letter)
            else:
                sent = letter["message"]
                print(
                    letter["reason"],
                    letter["from"],
                    letter["to"],
                    sent.get("type"),
                    _json(sent.get("payload")),
                )
        flush_output()
        if not shown and not session.json:
            print_empty("dead letters")
        return OK
    from tailrace.client import ClientError

    failed = 0
    with join_hub(session) as hub:
        for identifier, letter in found:
            origin = {"stream": DEAD_LETTERS, "id": identifier}
            try:
                _send_again(hub, letter["message"], letter["to"], origin, session)
            except ClientError as error:
                failed += 1
                report_error(error, as_json=session.json)
    return REFUSED if failed else OK


def replay(
    address: Annotated[str, Parameter(help="The owner of the mailbox.")],
    /,
    *,
    to: Annotated[str, Parameter(help="The recipient of the messages.")],
    offset: Annotated[str, Parameter(help="Where to start; the beginning by default.")] = "-1",
    since: Annotated[
        str | None, Parameter(help="Start at this time (RFC 3339), or with the last 15m, 1h or 7d.")
    ] = None,
    limit: Limit = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Send the messages of a mailbox to another address, marked as replayed. The mailbox is not changed."""
    from tailrace.hub.addresses import mailbox_stream, parse_address

    if address == to:
        raise UsageError("--to must be another address than the mailbox")
    parse_address(to, "to")
    since = None if since is None else parse_past_time(since, "--since")
    stream = mailbox_stream(parse_address(address))
    with join_hub(session) as hub:
        for at, message in _limited(_mailbox_entries(hub, address, offset, since), limit):
            _send_again(hub, message, to, {"stream": stream, "offset": at}, session)


def kick(
    address: Annotated[str, Parameter(help="The address to unregister.")],
    /,
    *,
    session: Session = DEFAULT_SESSION,
) -> None:
    """End a registration. A connected actor may register again; its mailbox is not changed."""
    from tailrace.client import ClientError

    with join_hub(session) as hub:
        if not list(hub.discover(address)):
            raise ClientError("unknown_actor", f"{address} is not registered")
        try:
            hub.unregister(address)
        except ClientError as error:
            if session.token is not None or error.code not in ("unauthorized", "invalid_request"):
                raise
        if list(hub.discover(address)):
            # Without tokens any client may register an address, and so unregister it.
            hub.register(address)
            hub.unregister(address)
    print(f"{address} is no longer registered")


def _letters(
    session: Session, to: str | None, reason: str | None, since: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    from tailrace.client import ClientError

    with connect_client(session) as client:
        try:
            for letter in client.stream(DEAD_LETTERS).entries(since=since):
                if to in (None, letter.get("to")) and reason in (None, letter.get("reason")):
                    yield letter["id"], letter
        except ClientError as error:
            if error.status != 404:  # there were never any dead letters
                raise


def _mailbox_entries(
    hub: Hub, address: str, offset: str, since: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a mailbox, page by page."""
    page = hub.read_mailbox(address, offset=offset, since=since)
    while True:
        for entry in page.messages:
            yield entry.offset, entry.message
        if page.up_to_date or not page.messages:
            return
        page = hub.read_mailbox(address, offset=page.next_offset)


def _limited(
    found: Iterator[tuple[str, dict[str, Any]]], limit: int | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, entry in enumerate(found):
        if number == limit:
            return
        yield entry


def _send_again(hub: Hub, message: dict[str, Any], to: str, origin: dict[str, str], session: Session) -> None:
    import msgspec

    metadata = {"replayedFrom": {"messageId": message.get("id"), "from": message.get("from"), **origin}}
    ack = hub.send(to, str(message.get("type")), message.get("payload"), ack="accepted", metadata=metadata)
    if session.json:
        print_json(msgspec.structs.asdict(ack))
    else:
        print(f"{ack.status} {message.get('type')} of {message.get('from')} to {to}")
    flush_output()


def _json(value: object) -> str:
    import orjson

    return orjson.dumps(value).decode()


_HELP: Final = """Send messages to actors, and manage mailboxes and dead letters.

For example:

    tailrace hub ls

    tailrace hub send '@(svc/price)' changed '{"sku": 7}' --ack accepted

    tailrace hub ask '@(svc/price)' quote '{"sku": 7}'

    tailrace hub sub 'orders/#'

    tailrace hub dead-letters

Data is JSON; a word that is not JSON is sent as a string. Data that begins with a brace, a bracket or a quote
must be JSON. `--as` is the address to act under; by default the identity of the token.
"""

command = App(name="hub", help=_HELP, help_format="markdown")

As = Annotated[
    str | None,
    Parameter(name="--as", help="The address to act under; another connection under it is closed."),
]
JSON_BEGINS: Final = ("{", "[", '"')
Count = Annotated[int | None, Parameter(help="Stop after this many.")]


@contextmanager
def join_hub(session: Session, address: str | None = None) -> Generator[Hub]:
    """A connection to the hub for the duration of the command."""
    from tailrace.client import ClientError, Retries
    from tailrace.client.hub import Hub

    authorization_header(session)
    try:
        hub = Hub(
            session.url,
            address=address or f"@(cli/{secrets.token_hex(4)})",
            token=session.token,
            retries=Retries(attempts_max=2),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        with hub:
            yield hub
    except ClientError as error:
        if error.code != "connect_failed":
            raise
        raise unreachable(session.url, error) from None


def parse_json_or_text(text: str | None) -> bytes:
    """JSON as it is, other text as a string. Text that begins like JSON must be valid."""
    import orjson

    if text is None:
        return b"null"
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        as_string = orjson.dumps(text)
        if text.lstrip().startswith(JSON_BEGINS):
            raise UsageError(
                f"data is not valid JSON: {error}; to send it as text, write it as a JSON string: "
                + shlex.quote(as_string.decode())
            ) from None
        return as_string
    return text.encode()


@command.command
def ls(
    pattern: Annotated[str, Parameter(help="Address pattern; `*` matches any characters.")] = "*",
    /,
    *,
    capability: Annotated[
        list[str] | None, Parameter(negative="", help="Only actors with this capability; may be repeated.")
    ] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """List actors by address."""
    with join_hub(session) as hub:
        actors = hub.discover(pattern, capabilities=capability or ())
        if session.json:
            import msgspec

            for actor in actors:
                print_json(msgspec.structs.asdict(actor))
            flush_output()
        else:
            _show_actors(actors)


@command.command
def send(
    to: Annotated[str, Parameter(help="The recipient, as in @(svc/price).")],
    kind: Annotated[str, Parameter(name="type", help="The type of the message.")],
    data: Annotated[str | None, Parameter(help="JSON or text.")] = None,
    /,
    *,
    ack: Annotated[
        Literal["delivered", "accepted", "processed"],
        Parameter(help="The acknowledgement to wait for."),
    ] = "delivered",
    ttl: Annotated[int | None, Parameter(help="Time to live in milliseconds.")] = None,
    timeout: Annotated[float, Parameter(help="Seconds to wait.")] = 30.0,
    sender: As = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Send one message, and print its acknowledgement."""
    import msgspec

    body = parse_json_or_text(data)
    with join_hub(session, sender) as hub:
        found = hub.send(to, kind, body, ack=ack, ttl_ms=ttl, timeout_s=timeout)
    if session.json:
        print_json(msgspec.structs.asdict(found))
    else:
        place = f" at {found.offset} of {found.stream}" if found.offset else ""
        print(f"{found.status}{place}")


@command.command
def ask(
    to: Annotated[str, Parameter(help="The recipient, as in @(svc/price).")],
    kind: Annotated[str, Parameter(name="type", help="The type of the request.")],
    data: Annotated[str | None, Parameter(help="JSON or text.")] = None,
    /,
    *,
    timeout: Annotated[float, Parameter(help="Seconds to wait for the reply.")] = 30.0,
    sender: As = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Send a request to an actor and print the reply; partial replies are printed as they arrive."""
    body = parse_json_or_text(data)
    with join_hub(session, sender) as hub:
        reply = hub.ask(to, kind, body, timeout_s=timeout, on_part=_put_now)
    print_json(reply)
    flush_output()


@command.command
def sub(
    topic: Annotated[str, Parameter(help="A topic; `+` matches one segment, a final `#` all the rest.")],
    /,
    *,
    group: Annotated[
        str | None, Parameter(help="Share the messages with other members of this group.")
    ] = None,
    count: Count = None,
    sender: As = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Print messages published to a topic, until Ctrl-C."""
    with join_hub(session, sender) as hub:
        hub.subscribe(topic, group=group)
        print(f"listening to {topic}", file=sys.stderr)
        try:
            show_messages(hub.messages(), count, as_json=session.json)
        except KeyboardInterrupt:
            return


@command.command
def tail(
    address: Annotated[str, Parameter(help="The owner of the mailbox.")],
    /,
    *,
    from_start: Annotated[bool, Parameter(negative="", help="Print everything first, then follow.")] = False,
    count: Count = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Follow the mailbox of an actor without committing anything, until Ctrl-C."""
    from tailrace.cli.session import connect_client, exit_on_interrupt
    from tailrace.hub.addresses import mailbox_stream, parse_address

    stream = mailbox_stream(parse_address(address))
    with connect_client(session) as client:
        client.stream(stream).head()
        left = count
        exit_on_interrupt()
        for page in client.stream(stream).follow("-1" if from_start else "now", mode="sse"):
            for entry in page.entries:
                print_json(entry if session.json else _summary(entry))
                left = None if left is None else left - 1
                if left == 0:
                    flush_output()
                    return
            flush_output()


def show_messages(messages: Iterable[Message], count: int | None, *, as_json: bool) -> None:
    left = count
    for message in messages:
        if as_json:
            described: dict[str, Any] = {"type": message.type, "from": message.sender, "to": message.to}
            print_json({**described, "data": message.data, "metadata": message.metadata, "id": message.id})
        else:
            write_output(
                f"{message.topic or message.to} {message.sender} {message.type} ".encode()
                + message.raw
                + b"\n"
            )
        flush_output()
        left = None if left is None else left - 1
        if left == 0:
            return


def _summary(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry.get(name) for name in ("from", "type", "payload", "timestamp")}


def _put_now(value: object) -> None:
    print_json(value)
    flush_output()


def _show_actors(actors: Iterable[Actor]) -> None:
    columns = (
        Column("address", fold=True),
        Column("state"),
        Column("mailbox"),
        Column("capabilities", fold=True),
    )
    rows = (
        (
            actor.address,
            "online" if actor.online else "away",
            "yes" if actor.durable else "no",
            " ".join(actor.capabilities),
        )
        for actor in actors
    )
    if not print_table(columns, rows):
        print_empty("actors")


command.command(mailbox)
command.command(dead_letters, name="dead-letters")
command.command(replay)
command.command(kick)
