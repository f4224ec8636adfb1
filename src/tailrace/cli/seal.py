"""``tailrace seal``: what is only on the server's disk goes to the object store now."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.call import reason_of
from tailrace.cli.failures import RefusedError, UnreachableError
from tailrace.cli.session import DEFAULT, Session, flush, put, put_json

_HELP: Final = """Seal a stream, or all of them, without waiting for their size or age.

It returns when everything appended before is in segments on the object store and in the manifests.

For example:

    tailrace seal

    tailrace seal orders
"""
_ANSWER_S_MAX: Final = 60.0

command = App(name="seal", help=_HELP, help_format="markdown")


@command.default
def seal(
    stream: Annotated[str, Parameter(help="The stream; all of them if left out.")] = "",
    /,
    *,
    session: Session = DEFAULT,
) -> None:
    import httpx2

    headers = {"Authorization": f"Bearer {session.token}"} if session.token else {}
    parameters = {"stream": stream} if stream else {}
    try:
        with httpx2.Client(timeout=_ANSWER_S_MAX, headers=headers) as http:
            # 202: not done within one request's time, and still going on.
            while (
                answer := http.post(f"{session.url}/v1/server/_seal", params=parameters)
            ).status_code == 202:
                pass
    except httpx2.TransportError:
        raise UnreachableError(
            f"no server answers at {session.url}; start one with: tailrace serve"
        ) from None
    if answer.status_code != 200:
        raise RefusedError(reason_of(answer.content))
    if session.json:
        put_json({"sealed": True, "stream": stream or None})
    else:
        put(f"{stream or 'everything'} is sealed\n".encode())
    flush()
