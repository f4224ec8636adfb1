"""``tailrace hub``: actors, their messages and their mailboxes, from the command line."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from tailrace.cli import hub_care
from tailrace.cli.call import authorization_header
from tailrace.cli.errors import UsageError, unreachable
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    print_empty,
    print_json,
    write_output,
)
from tailrace.cli.tables import Column, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.client.hub import Actor, Hub, Message

_HELP: Final = """Talk to actors at the hub, and look after their messages.

For example:

    tailrace hub ls

    tailrace hub send '@(svc/price)' changed '{"sku": 7}' --ack accepted

    tailrace hub ask '@(svc/price)' quote '{"sku": 7}'

    tailrace hub sub 'orders/#'

    tailrace hub dead-letters

Data is JSON; a word that is none is taken as a string. What begins with a brace, a bracket or a quote has to
be JSON. `--as` says under which address to act; with a token, its identity is meant if nothing is given.
"""

command = App(name="hub", help=_HELP, help_format="markdown")

As = Annotated[
    str | None,
    Parameter(name="--as", help="The address to act under; another connection under it is closed."),
]
JSON_BEGINS: Final = ("{", "[", '"')
Count = Annotated[int | None, Parameter(help="Stop after so many.")]


@contextmanager
def join_hub(session: Session, address: str | None = None) -> Generator[Hub]:
    """A place at the hub, for as long as the command takes."""
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
    """JSON as it is written, any other text as a string. What begins like JSON and is none is refused: it is
    more often a mistake than a text."""
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
    pattern: Annotated[str, Parameter(help="Which addresses; `*` is any run of characters.")] = "*",
    /,
    *,
    capability: Annotated[
        list[str] | None, Parameter(negative="", help="Only actors that can do this; may be repeated.")
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
    data: Annotated[str | None, Parameter(help="JSON, or a text.")] = None,
    /,
    *,
    ack: Annotated[
        Literal["delivered", "accepted", "processed"],
        Parameter(help="How far it has to come before this returns."),
    ] = "delivered",
    ttl: Annotated[int | None, Parameter(help="Milliseconds after which it is of no use.")] = None,
    timeout: Annotated[float, Parameter(help="Seconds to wait.")] = 30.0,
    sender: As = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Send one message, and say how far it came."""
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
    to: Annotated[str, Parameter(help="Whom to ask, as in @(svc/price).")],
    kind: Annotated[str, Parameter(name="type", help="The type of the question.")],
    data: Annotated[str | None, Parameter(help="JSON, or a text.")] = None,
    /,
    *,
    timeout: Annotated[float, Parameter(help="Seconds to wait for the reply.")] = 30.0,
    sender: As = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Ask an actor something, and print the reply. Parts that come before it are printed as they come."""
    body = parse_json_or_text(data)
    with join_hub(session, sender) as hub:
        reply = hub.ask(to, kind, body, timeout_s=timeout, on_part=_put_now)
    print_json(reply)
    flush_output()


@command.command
def sub(
    topic: Annotated[str, Parameter(help="A topic; `+` is one segment, a last `#` all the rest.")],
    /,
    *,
    group: Annotated[str | None, Parameter(help="Share the work with others of this group.")] = None,
    count: Count = None,
    sender: As = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Print what is published to a topic, until Ctrl-C."""
    with join_hub(session, sender) as hub:
        hub.subscribe(topic, group=group)
        print(f"listening to {topic}", file=sys.stderr)
        try:
            show_messages(hub.messages(), count, as_json=session.json)
        except KeyboardInterrupt:
            return


@command.command
def tail(
    address: Annotated[str, Parameter(help="Whose mailbox.")],
    /,
    *,
    from_start: Annotated[bool, Parameter(negative="", help="Print everything first, then follow.")] = False,
    count: Count = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Follow the mailbox of an actor, without taking anything out of it, until Ctrl-C."""
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


command.command(hub_care.mailbox)
command.command(hub_care.dead_letters, name="dead-letters")
command.command(hub_care.replay)
command.command(hub_care.kick)
