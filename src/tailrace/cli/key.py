"""``tailrace key``: API keys, at a server or in a file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import UsageError
from tailrace.cli.options import ActorId, Databases, Prefixes, Scopes, parse_lifetime_s
from tailrace.cli.session import DEFAULT_SESSION, Session, print_empty, print_json
from tailrace.cli.tables import Column, print_table

if TYPE_CHECKING:
    from tailrace.auth import IdentityStore

_HELP: Final = """Create, list and revoke API keys.

A key is a long-lived secret for a program. It is shown once, when it is created; servers store its hash.
With `--file` the commands change a file of keys that servers read (`auth_keys_file`), which is how the first
key is created; without it they use a running server, with a token that may manage everything.

For example:

    tailrace key create --file keys.json --sub admin --scope manage

    tailrace key create --sub ci --scope write --streams builds/

    tailrace key revoke 8c1f0a52be93d674
"""

PATH: Final = "/v1/server/_keys"
KEY_PREFIX: Final = "trk_"
_COLUMNS: Final = (
    Column("id"),
    Column("subject", fold=True),
    Column("scopes"),
    Column("streams", fold=True),
    Column("expires"),
)

InFile = Annotated[
    Path | None, Parameter(env_var="TAILRACE_AUTH_KEYS_FILE", help="Change this file instead of a server.")
]

command = App(name="key", help=_HELP, help_format="markdown")


@command.command
def create(
    *,
    sub: Annotated[str, Parameter(help="The subject of the key.")],
    scope: Scopes,
    streams: Prefixes = None,
    db: Databases = None,
    actor_id: ActorId = None,
    expires: Annotated[str, Parameter(help="Lifetime, such as 8h or 90d, or never.")] = "never",
    file: InFile = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Create a key and print it. Store it: it cannot be shown again."""
    lasts_s = parse_lifetime_s(expires)
    if file is not None:
        from tailrace.auth import create_api_key

        key, text = create_api_key(
            sub=sub, scopes=scope, streams=streams, dbs=db, actor_id=actor_id, lifetime_s=lasts_s
        )
        open_key_file(file).add_key(key)
        made: dict[str, Any] = {"key": text, **key.to_public()}
    else:
        from tailrace.cli.session import post_json

        asked = {"sub": sub, "scopes": scope, "streams": streams, "databases": db}
        made = post_json(session, PATH, {**asked, "actorId": actor_id, "expiresIn": lasts_s})
    if session.json:
        print_json(made)
    else:
        print(made["key"])


@command.command(name="list")
def list_keys(*, file: InFile = None, session: Session = DEFAULT_SESSION) -> None:
    """List keys, without their secrets."""
    if file is not None:
        found = [key.to_public() for key in open_key_file(file).read_records().keys]
    else:
        from tailrace.cli.session import get_json

        found = get_json(session, PATH)["keys"]
    if session.json:
        for key in found:
            print_json(key)
    elif not print_table(_COLUMNS, map(_row, found)):
        print_empty("keys")


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    streams = "all" if key["streams"] is None else " ".join(key["streams"])
    expires = "never" if key["expiresAt"] is None else _day(key["expiresAt"])
    return (key["id"], key["sub"], " ".join(key["scopes"]), streams, expires)


@command.command
def revoke(
    key_id: Annotated[str, Parameter(help="The id of the key, or the key itself.")],
    /,
    *,
    file: InFile = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Revoke a key. Connections opened with it are closed."""
    bare_id = key_id.removeprefix(KEY_PREFIX).partition("_")[0]
    if file is not None:
        open_key_file(file).remove_key(bare_id)
    else:
        from urllib.parse import quote

        from tailrace.cli.session import delete_resource

        delete_resource(session, f"{PATH}/{quote(bare_id, safe='')}")
    if session.json:
        print_json({"revoked": bare_id})
    else:
        print(f"revoked {bare_id}")


def open_key_file(file: Path) -> IdentityStore:
    from tailrace.auth import IdentityFile, IdentityStore

    return IdentityStore(IdentityFile(file))


def open_existing_key_file(file: Path) -> IdentityStore:
    """For revocations: a new file that no server reads would have no effect."""
    if not file.exists():
        raise UsageError(f"file {file} not found: nothing was revoked")
    return open_key_file(file)


def is_key(text: str) -> bool:
    return text.startswith(KEY_PREFIX)


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
