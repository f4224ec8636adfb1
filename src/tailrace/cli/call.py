"""One plain request to a server, for commands whose answer is a JSON document."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli.errors import RefusedError, UsageError, unreachable

if TYPE_CHECKING:
    import httpx2

    from tailrace.cli.session import Session

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
