"""Connection of a command to a server: options, client, plain requests, and output."""

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
    """Add http:// to an address without a scheme, such as `localhost:5101`."""
    return address if "://" in address else f"http://{address}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Session:
    """Flags of all commands that use a server."""

    url: Annotated[
        str,
        Parameter(env_var=URL_VARIABLES, group=_GROUP, help="The server; http:// is optional."),
    ] = URL_DEFAULT
    token: Annotated[
        str | None,
        Parameter(
            env_var="TAILRACE_TOKEN", group=_GROUP, help="Access token; preferably given as the variable."
        ),
    ] = None
    json: Annotated[bool, Parameter(group=_GROUP, negative="", help="Print JSON, one object per line.")] = (
        False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", with_scheme(self.url))


DEFAULT_SESSION: Final = Session()


@contextmanager
def connect_client(session: Session) -> Generator[Client]:
    """A client with short retries, as a person is waiting."""
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
    """Write bytes to standard output unchanged."""
    sys.stdout.buffer.write(line)


def flush_output() -> None:
    sys.stdout.buffer.flush()


def print_empty(what: str) -> None:
    """Report an empty list on standard error, so that standard output stays empty."""
    flush_output()
    sys.stderr.write(f"no {what}\n")


def exit_on_interrupt() -> None:
    """From here on Ctrl-C exits at once with code 0.

    For commands that run until Ctrl-C and flush their output. A KeyboardInterrupt would be lost where nothing
    can be raised, as in a destructor, and the command would continue.
    """

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(0)

    signal.signal(signal.SIGINT, leave)


def print_json(value: object) -> None:
    import orjson

    write_output(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))


def single_line_json(message: bytes) -> bytes:
    """A JSON message on one line; its tokens are not changed."""
    if b"\n" not in message and b"\r" not in message:
        return message
    import msgspec

    try:
        return msgspec.json.format(message, indent=-1)
    except msgspec.DecodeError:
        # orjson refuses lone surrogates. Line breaks in JSON are always between two tokens.
        return message.replace(b"\r", b" ").replace(b"\n", b" ")


_ANSWER_S_MAX: Final = 60.0
_CONNECT_S_MAX: Final = 5.0


def stream_path(stream: str, resource: str) -> str:
    from tailrace.client import wire

    return f"{wire.stream_path(stream)}/{resource}"


def get_json(session: Session, path: str) -> dict[str, Any]:
    """GET a JSON document; an error response is raised."""
    return _call(session, "GET", path, None)


def delete_resource(session: Session, path: str) -> None:
    """DELETE a resource; an error response is raised."""
    _call(session, "DELETE", path, None)


def post_json(session: Session, path: str, body: object) -> dict[str, Any]:
    """POST a JSON document and return that of the response; an error response is raised."""
    import orjson

    return _call(session, "POST", path, orjson.dumps(body))


def adopt_json(session: Session, path: str, body: object) -> dict[str, Any]:
    """As `post_json` with `adopt=true`: shows the progress of the check of existing entries."""
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
    """Show the progress lines of a response, and return the result at its end."""
    import orjson

    from tailrace.client.errors import error_from

    shown = sys.stderr.isatty()
    for line in lines:
        update = orjson.loads(line)
        if "checked" in update and shown:
            percent = 100 * update["checked"] // max(1, update["total"])
            sys.stderr.write(f"\rchecked {update['checked']:,} of {update['total']:,} entries ({percent} %) ")
            sys.stderr.flush()
        elif "checked" not in update and shown:
            sys.stderr.write("\n")
        if "error" in update:
            raise error_from(400, {}, line.encode())
        if "result" in update:
            return update["result"]
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
    """Send one request without retries, and return the response with any status."""
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
    """The HTTP client would resolve dots, and the request would be for another resource."""
    if any(segment in (".", "..") for segment in path.partition("?")[0].split("/")):
        raise UsageError(f"a path must not have '.' or '..' segments: {path}")
    return path


def require_server(session: Session) -> None:
    """Check that the server responds before something slow is started."""
    send_request(session, "GET", "/healthz")


def authorization_header(session: Session) -> dict[str, str]:
    """The authorization header. Invalid URLs and tokens are reported here."""
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
    # The error of the HTTP client would not name the missing file.
    if (trusted := os.environ.get("SSL_CERT_FILE")) and not Path(trusted).is_file():
        raise UsageError(f"SSL_CERT_FILE: file {trusted} not found")
    return {} if value is None else {"Authorization": value.decode()}


def server_error(answer: httpx2.Response) -> Exception:
    """An error response as an exception, with its error code."""
    from tailrace.client.errors import error_from

    return error_from(answer.status_code, dict(answer.headers), answer.content)
