"""One plain request to a server, for commands whose answer is a JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from tailrace.cli.failures import RefusedError, UnreachableError

if TYPE_CHECKING:
    from tailrace.cli.session import Session

_ANSWER_S_MAX: Final = 60.0


def stream_path(stream: str, resource: str) -> str:
    return f"/v1/stream/{quote(stream)}/{resource}"


def get_json(session: Session, path: str) -> dict[str, Any]:
    """The document at a path, or the refusal as an error."""
    return _call(session, "GET", path, None)


def delete(session: Session, path: str) -> None:
    """Removes what is at a path, or the refusal as an error."""
    _call(session, "DELETE", path, None)


def post_json(session: Session, path: str, body: object) -> dict[str, Any]:
    """The document that comes back for one, or the refusal as an error."""
    import orjson

    return _call(session, "POST", path, orjson.dumps(body))


def _call(session: Session, method: str, path: str, body: bytes | None) -> dict[str, Any]:
    import httpx2
    import orjson

    headers = {"Authorization": f"Bearer {session.token}"} if session.token else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        with httpx2.Client(timeout=_ANSWER_S_MAX, headers=headers) as http:
            answer = http.request(method, session.url.rstrip("/") + path, content=body)
    except httpx2.TransportError:
        raise UnreachableError(
            f"no server answers at {session.url}; start one with: tailrace serve"
        ) from None
    if not answer.is_success:
        raise RefusedError(reason_of(answer.content))
    return orjson.loads(answer.content) if answer.content else {}


def reason_of(body: bytes) -> str:
    """What the server says about a refusal, for people."""
    import orjson

    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace")
