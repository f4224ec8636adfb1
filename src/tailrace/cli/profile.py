"""``tailrace profile``: show and change the profile of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import UsageError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    adopt_json,
    flush_output,
    get_json,
    post_json,
    print_json,
    stream_path,
    write_output,
)

_HELP: Final = """Show and change the profile of a stream.

Kinds are `generic`, `evlog`, `metrics`, `otel-traces` and `state-protocol`.

For example:

    tailrace profile get requests

    tailrace profile set requests evlog --redact card --redact pin

    tailrace profile set changes state-protocol --touch

    tailrace profile set spans otel-traces --redact card
"""

Stream = Annotated[str, Parameter(help="The stream.")]

command = App(name="profile", help=_HELP, help_format="markdown")


@command.command
def get(stream: Stream, /, *, session: Session = DEFAULT_SESSION) -> None:
    """Print the profile of a stream."""
    _show(get_json(session, stream_path(stream, "_profile")), session)


@command.command(name="set")
def set_(
    stream: Stream,
    kind: Annotated[str, Parameter(help="The kind of profile.")],
    /,
    *,
    redact: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Key whose values are never stored (evlog and otel-traces)."),
    ] = (),
    touch: Annotated[bool | None, Parameter(help="Enable touches (state-protocol).")] = None,
    config: Annotated[str | None, Parameter(help="The rest of the profile, as a JSON object.")] = None,
    adopt: Annotated[
        bool,
        Parameter(negative="", help="Check the existing entries, and apply the profile to them as well."),
    ] = False,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Set the profile of a stream, or change its configuration."""
    profile: dict[str, Any] = {"kind": kind, **_object(config)}
    if redact:
        profile["redactKeys"] = list(redact)
    if touch is not None:
        profile["touch"] = {**profile.get("touch", {}), "enabled": touch}
    post = adopt_json if adopt else post_json
    _show(post(session, stream_path(stream, "_profile"), {"profile": profile}), session)


def _object(text: str | None) -> dict[str, Any]:
    import orjson

    if text is None:
        return {}
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"--config is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError("--config must be a JSON object")
    return found  # pyright: ignore[reportUnknownVariableType]


def _show(resource: dict[str, Any], session: Session) -> None:
    import orjson

    if session.json:
        print_json(resource)
    else:
        write_output(orjson.dumps(resource, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    flush_output()
