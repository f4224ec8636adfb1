"""What every command that talks to a server shares: where it is, who asks, and how answers are printed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from tailrace.client import Client

URL_DEFAULT: Final = "http://127.0.0.1:4437"
URL_VARIABLES: Final = ("TAILRACE_URL", "TAILRACE_ENDPOINT")
_GROUP: Final = Group("Connection and output", sort_key=9)


def with_scheme(address: str) -> str:
    """`localhost:5101` as a URL; an address that names its scheme stays as it is."""
    return address if "://" in address else f"http://{address}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Session:
    """Flags of all commands that talk to a server."""

    url: Annotated[
        str,
        Parameter(env_var=URL_VARIABLES, group=_GROUP, help="The server; http:// may be left out."),
    ] = URL_DEFAULT
    token: Annotated[
        str | None,
        Parameter(env_var="TAILRACE_TOKEN", group=_GROUP, help="Access token; better given as the variable."),
    ] = None
    json: Annotated[bool, Parameter(group=_GROUP, negative="", help="Print JSON, one object per line.")] = (
        False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", with_scheme(self.url))


DEFAULT_SESSION: Final = Session()


@contextmanager
def connect_client(session: Session) -> Generator[Client]:
    """A client that gives up soon: a person is waiting."""
    from tailrace.cli.call import authorization_header
    from tailrace.cli.errors import unreachable
    from tailrace.client import Client, ClientError, Retries

    authorization_header(session)
    retries = Retries(attempts_max=3, elapsed_s_max=10.0)
    with Client(session.url, token=session.token, retries=retries) as client:
        try:
            yield client
        except ClientError as error:
            if error.code != "connect_failed":
                raise
            raise unreachable(session.url, error) from None


def write_output(line: bytes) -> None:
    """Write to standard output as it is, so that bytes stay bytes in a pipe."""
    sys.stdout.buffer.write(line)


def flush_output() -> None:
    sys.stdout.buffer.flush()


def print_empty(what: str) -> None:
    """An empty list: said on standard error, so that whoever reads the output finds nothing in it."""
    flush_output()
    sys.stderr.write(f"no {what}\n")


def exit_on_interrupt() -> None:
    """From here on Ctrl-C ends the program at once, as something that was to be expected.

    For commands that go on until then and flush what they show. An exception would be lost if it came up
    where nothing can be raised, in a destructor for example, and the command would go on.
    """

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(0)

    signal.signal(signal.SIGINT, leave)


def print_json(value: object) -> None:
    import orjson

    write_output(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))


def single_line_json(message: bytes) -> bytes:
    """A JSON message without the line breaks it may have been written with; its tokens stay as they are."""
    if b"\n" not in message and b"\r" not in message:
        return message
    import msgspec

    try:
        return msgspec.json.format(message, indent=-1)
    except msgspec.DecodeError:
        # It does not take lone surrogates. A line break of JSON is always between two tokens.
        return message.replace(b"\r", b" ").replace(b"\n", b" ")
