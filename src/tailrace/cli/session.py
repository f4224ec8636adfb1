"""Connection of a command to a server: options, client, plain requests, and output.

What every command that talks to a server shares: where it is, who asks, and how answers are printed.

One plain request to a server, for commands whose answer is a JSON document.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Group, Parameter

from tailrace.cli.errors import RefusedError, UsageError, unreachable

if TYPE_CHECKING:
    import httpx2

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


_ANSWER_S_MAX: Final = 60.0
_CONNECT_S_MAX: Final = 5.0


def stream_path(stream: str, resource: str) -> str:
    from tailrace.client import wire

    return f"{wire.stream_path(stream)}/{resource}"


def get_json(session: Session, path: str) -> dict[str, Any]:
    """The document at a path, or the refusal as an error."""
    return _call(session, "GET", path, None)


def delete_resource(session: Session, path: str) -> None:
    """Removes what is at a path, or the refusal as an error."""
    _call(session, "DELETE", path, None)


def post_json(session: Session, path: str, body: object) -> dict[str, Any]:
    """The document that comes back for one, or the refusal as an error."""
    import orjson

    return _call(session, "POST", path, orjson.dumps(body))


def adopt_json(session: Session, path: str, body: object) -> dict[str, Any]:
    """As `post_json`, for what a stream with entries is to adopt; tells how far its check is."""
    import httpx2
    import orjson

    sent = authorization_header(session) | {
        "Content-Type": "application/json",
        "Accept": "application/x-ndjson",
    }
    timeout = httpx2.Timeout(_ANSWER_S_MAX, connect=_CONNECT_S_MAX)
    where = session.url.rstrip("/") + _check_plain_path(path) + "?adopt=true"
    try:
        with (
            httpx2.Client(timeout=timeout) as http,
            http.stream("POST", where, content=orjson.dumps(body), headers=sent) as answer,
        ):
            if answer.headers.get("content-type") == "application/x-ndjson":
                return _follow_progress(answer.iter_lines())
            answer.read()
    except httpx2.TransportError as error:
        raise unreachable(session.url, error) from None
    if not answer.is_success:
        raise server_error(answer)
    return orjson.loads(answer.content)


def _follow_progress(lines: Iterator[str]) -> dict[str, Any]:
    """The result at the end of an answer that tells its progress."""
    import orjson

    from tailrace.client.errors import error_from

    shown = sys.stderr.isatty()
    for line in lines:
        told = orjson.loads(line)
        if "checked" in told and shown:
            percent = 100 * told["checked"] // max(1, told["total"])
            sys.stderr.write(f"\rchecked {told['checked']:,} of {told['total']:,} entries ({percent} %) ")
            sys.stderr.flush()
        elif "checked" not in told and shown:
            sys.stderr.write("\n")
        if "error" in told:
            raise error_from(400, {}, line.encode())
        if "result" in told:
            return told["result"]
    raise RefusedError("the server ended the check without a result; nothing was changed")


def _call(session: Session, method: str, path: str, body: bytes | None) -> dict[str, Any]:
    import orjson

    answer = send_request(session, method, path, body)
    if not answer.is_success:
        raise server_error(answer)
    return orjson.loads(answer.content) if answer.content else {}


def send_request(
    session: Session, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> httpx2.Response:
    """What the server answers, whatever it is. Nothing is sent twice."""
    import httpx2

    path = _check_plain_path(path)
    sent = authorization_header(session) | ({} if body is None else {"Content-Type": "application/json"})
    try:
        timeout = httpx2.Timeout(_ANSWER_S_MAX, connect=_CONNECT_S_MAX)
        with httpx2.Client(timeout=timeout) as http:
            where = session.url.rstrip("/") + path
            return http.request(method, where, content=body, headers=sent | (headers or {}))
    except httpx2.TransportError as error:
        raise unreachable(session.url, error) from None


def _check_plain_path(path: str) -> str:
    """The client of HTTP would resolve dots, and something else would be read, changed or deleted."""
    if any(segment in (".", "..") for segment in path.partition("?")[0].split("/")):
        raise UsageError(f"a path has no '.' or '..' segments: {path}")
    return path


def require_server(session: Session) -> None:
    """Somebody answers: asked before something is begun that takes longer than saying that nobody does."""
    send_request(session, "GET", "/healthz")


def authorization_header(session: Session) -> dict[str, str]:
    """The header that says who asks. An address or a token that cannot be is told here."""
    from tailrace.client import transport

    try:
        settings = transport.make_settings(
            session.url,
            token=session.token,
            timeout_s=_ANSWER_S_MAX,
            connect_timeout_s=_CONNECT_S_MAX,
            retries=None,
        )
        value = settings.authorization()
    except ValueError as error:
        raise UsageError(str(error)) from None
    # Whoever makes a connection would be told that some file is missing, and not which.
    if (trusted := os.environ.get("SSL_CERT_FILE")) and not Path(trusted).is_file():
        raise UsageError(f"SSL_CERT_FILE names no file: {trusted}")
    return {} if value is None else {"Authorization": value.decode()}


def server_error(answer: httpx2.Response) -> Exception:
    """What the server says about a refusal, with the code that scripts look at."""
    from tailrace.client.errors import error_from

    return error_from(answer.status_code, dict(answer.headers), answer.content)
