"""``tailrace create``: create a stream with its type, retention and profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import App, Group, Parameter

from tailrace.cli.errors import UsageError
from tailrace.cli.options import parse_future_time, parse_size_bytes, parse_span_s
from tailrace.cli.session import DEFAULT_SESSION, Session, connect_client, post_json, print_json, stream_path

if TYPE_CHECKING:
    from tailrace.client.wire import Lifetime

_HELP: Final = """Create a stream. A stream that exists with the same configuration is not changed.

For example:

    tailrace create orders

    tailrace create logs/app --type text/plain --retention 30d --retention-bytes 10GiB

    tailrace create sessions/7 --ttl 8h

    tailrace create requests --profile evlog

Durations are written as 90s, 15m, 8h or 7d, sizes as 64MiB or 10GiB.
"""
_BOUNDS: Final = Group("Retention", sort_key=2)

Ttl = Annotated[
    str | None,
    Parameter(group=_BOUNDS, help="Delete the stream if it is neither read nor written for this long."),
]
ExpiresAt = Annotated[
    str | None, Parameter(group=_BOUNDS, help="Delete the stream at this time (RFC 3339); not with --ttl.")
]
Retention = Annotated[str | None, Parameter(group=_BOUNDS, help="Delete entries older than this.")]
RetentionBytes = Annotated[
    str | None,
    Parameter(group=_BOUNDS, help="Delete the oldest entries above this payload size, such as 10GiB."),
]

command = App(name="create", help=_HELP, help_format="markdown")


@command.default
def create(
    name: Annotated[str, Parameter(help="The stream, for example orders or logs/app.")],
    /,
    *,
    content_type: Annotated[
        str, Parameter(name=("--type", "--content-type"), help="Content type of its entries.")
    ] = "application/json",
    profile: Annotated[
        Literal["generic", "evlog", "metrics", "otel-traces", "state-protocol"] | None,
        Parameter(help="The profile; see tailrace profile."),
    ] = None,
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    lifetime = lifetime_options(ttl, expires_at, retention, retention_bytes)
    with connect_client(session) as client:
        made = client.stream(name, content_type=content_type).create(**lifetime)
    if profile is not None:
        post_json(session, stream_path(name, "_profile"), {"profile": {"kind": profile}})
    if session.json:
        print_json({"stream": name, "created": made.created, "next_offset": made.next_offset})
    elif made.created:
        print(f"created {name} ({made.content_type})")
    else:
        print(f"{name} exists already with this configuration")


def lifetime_options(
    ttl: str | None, expires_at: str | None, retention: str | None, retention_bytes: str | None
) -> Lifetime:
    """The retention options as the client's `Lifetime`."""
    if ttl is not None and expires_at is not None:
        raise UsageError("use either --ttl or --expires-at, not both")
    return {
        "ttl": None if ttl is None else parse_span_s(ttl, "--ttl"),
        "expires_at": None if expires_at is None else parse_future_time(expires_at, "--expires-at"),
        "retention": None if retention is None else parse_span_s(retention, "--retention"),
        "retention_bytes": None
        if retention_bytes is None
        else parse_size_bytes(retention_bytes, "--retention-bytes"),
    }
