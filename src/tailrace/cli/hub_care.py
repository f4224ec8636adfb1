"""``tailrace hub``, for messages that are kept: mailboxes, dead letters, and sending either again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from tailrace.cli.errors import OK, REFUSED, UsageError, report_error
from tailrace.cli.quantities import parse_past_time
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    connect_client,
    flush_output,
    print_empty,
    print_json,
)

if TYPE_CHECKING:
    from tailrace.client.hub import Hub

DEAD_LETTERS: Final = "hub/dead-letters"
_PAGE: Final = 100

Limit = Annotated[int | None, Parameter(help="At most so many.")]


def mailbox(
    address: Annotated[str, Parameter(help="Whose mailbox.")],
    /,
    *,
    offset: Annotated[
        str, Parameter(help="Where to begin: committed, -1 (the start), or an offset.")
    ] = "committed",
    limit: Limit = _PAGE,
    commit: Annotated[
        str | None, Parameter(help="Say that everything up to this offset was processed.")
    ] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Show what waits in a mailbox. Looking moves nothing; --commit does."""
    from tailrace.cli.hub import join_hub

    # Not under the address itself: that would end the connection of its owner.
    with join_hub(session) as hub:
        if commit is not None:
            hub.commit_offset(commit, address=address)
        page = hub.read_mailbox(address, offset=offset, limit=limit or _PAGE)
    for kept in page.messages:
        message: dict[str, Any] = kept.message
        if session.json:
            print_json({"offset": kept.offset, "append_time": kept.append_time, "message": message})
        else:
            print(kept.offset, message.get("from"), message.get("type"), _json(message.get("payload")))
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
        Parameter(help="Only those of this time (RFC 3339) or later, or of the last 15m, 1h or 7d."),
    ] = None,
    limit: Limit = None,
    replay: Annotated[bool, Parameter(negative="", help="Send them again instead of showing them.")] = False,
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
    from tailrace.cli.hub import join_hub
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
    address: Annotated[str, Parameter(help="Whose mailbox.")],
    /,
    *,
    to: Annotated[str, Parameter(help="Who gets the messages.")],
    offset: Annotated[str, Parameter(help="Where to begin; the start if not given.")] = "-1",
    since: Annotated[
        str | None, Parameter(help="Begin at this time (RFC 3339), or with the last 15m, 1h or 7d.")
    ] = None,
    limit: Limit = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Send what a mailbox has kept to another address, marked as replayed. The mailbox stays as it is."""
    from tailrace.cli.hub import join_hub
    from tailrace.hub.addresses import mailbox_stream, parse_address

    if address == to:
        raise UsageError("a mailbox is not replayed into itself")
    parse_address(to, "to")
    since = None if since is None else parse_past_time(since, "--since")
    stream = mailbox_stream(parse_address(address))
    with join_hub(session) as hub:
        for at, message in _limited(_kept(hub, address, offset, since), limit):
            _send_again(hub, message, to, {"stream": stream, "offset": at}, session)


def kick(
    address: Annotated[str, Parameter(help="Whose registration ends.")],
    /,
    *,
    session: Session = DEFAULT_SESSION,
) -> None:
    """End a registration. An actor that is there may register again; its mailbox stays as it is."""
    from tailrace.cli.hub import join_hub
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
            # Without tokens every address is everybody's: whoever takes it may also let it go.
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
            if error.status != 404:  # no letter was ever dead
                raise


def _kept(hub: Hub, address: str, offset: str, since: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a mailbox, page by page."""
    page = hub.read_mailbox(address, offset=offset, since=since)
    while True:
        for kept in page.messages:
            yield kept.offset, kept.message
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
