"""``tailrace seal``: move all data to the object store now."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlencode

from cyclopts import App, Parameter

from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    print_json,
    send_request,
    server_error,
    write_output,
)

_HELP: Final = """Seal a stream, or all of them, without waiting for their size or age.

It returns when all earlier appends are in segments in the object store and in the manifests.

For example:

    tailrace seal

    tailrace seal orders
"""

command = App(name="seal", help=_HELP, help_format="markdown")


@command.default
def seal(
    stream: Annotated[str, Parameter(help="The stream; by default all.")] = "",
    /,
    *,
    session: Session = DEFAULT_SESSION,
) -> None:
    path = "/v1/server/_seal" + (f"?{urlencode({'stream': stream})}" if stream else "")
    # 202: not done within the request timeout; the server continues.
    while (answer := send_request(session, "POST", path)).status_code == 202:
        pass
    if answer.status_code != 200:
        raise server_error(answer)
    if session.json:
        print_json({"sealed": True, "stream": stream or None})
    else:
        write_output(f"{stream or 'everything'} is sealed\n".encode())
    flush_output()
